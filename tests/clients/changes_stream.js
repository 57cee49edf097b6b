// changes-stream: a database's changes as a stream of objects.

const assert = require('node:assert/strict')
const ChangesStream = require('changes-stream')
const { Seen, run } = require('./seen')

run(async url => {
  const ask = async (method, path, body) => {
    const answer = await fetch(`${url}/${path}`, { method, body: body && JSON.stringify(body) })
    if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status}`)
    return answer.json()
  }
  const follow = options => {
    const seen = new Seen()
    const stream = new ChangesStream({ db: `${url}/db`, ...options })
    stream.on('data', row => seen.push(row))
    stream.on('error', error => seen.push({ error: String(error) }))
    return { seen, stream }
  }
  await ask('PUT', 'db')
  const { rev } = await ask('PUT', 'db/a', { color: 'red' })
  const live = follow({ include_docs: true })
  const first = await live.seen.next({ id: 'a', changes: [{ rev }] })
  assert.equal(first.doc.color, 'red')
  const second = await ask('PUT', 'db/b', {})
  await live.seen.next({ id: 'b', changes: [{ rev: second.rev }] })
  live.stream.destroy()
  live.seen.end()
  const later = follow({ since: first.seq })
  await later.seen.next({ id: 'b', changes: [{ rev: second.rev }] })
  later.stream.destroy()
  later.seen.end()
})
