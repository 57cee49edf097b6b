// eventsource: the browser's interface, which reconnects by itself with the `Last-Event-ID` when a connection ends.

const assert = require('node:assert/strict')
const { EventSource } = require('eventsource')
const { Seen, run } = require('./seen')

/** Follows `_db_updates`; each row gets the `id` of its event. */
function follow (url, query) {
  const seen = new Seen()
  const source = new EventSource(`${url}/_db_updates?feed=eventsource&${query}`)
  source.onmessage = event => seen.push({ ...JSON.parse(event.data), id: JSON.parse(event.lastEventId) })
  return { seen, source }
}

run(async url => {
  const ask = async (method, path, body) => {
    const answer = await fetch(`${url}/${path}`, { method, body: body && JSON.stringify(body) })
    if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status}`)
  }
  const live = follow(url, 'since=now&heartbeat=100')
  // After three rows the connection ends, and the client reconnects.
  const cut = follow(url, 'since=0&limit=3&heartbeat=100')
  await new Promise((resolve, reject) => {
    live.source.onopen = resolve
    live.source.onerror = reject
  })
  const step = async (type, method, path, body) => {
    await ask(method, path, body)
    const { seq, id } = await live.seen.next({ db_name: 'db', type })
    assert.equal(id, seq)
    await cut.seen.next({ db_name: 'db', type, seq })
  }
  await step('created', 'PUT', 'db')
  await step('updated', 'PUT', 'db/x', {})
  await step('updated', 'PUT', 'db/y', {})
  await step('deleted', 'DELETE', 'db')
  await step('created', 'PUT', 'db')
  for (const { seen, source } of [live, cut]) {
    source.close()
    seen.end()
  }
})
