// follow, and cloudant-follow, which grew out of it: they follow a database and all databases, and send the next request by themselves when
// an answer ends.

const assert = require('node:assert/strict')
const { Seen, run } = require('./seen')

/** Follows a feed; each change becomes a row in `seen`. */
function follow (Feed, options) {
  const seen = new Seen()
  const feed = new Feed({ heartbeat: 10_000, ...options })
  feed.on('change', row => seen.push(row))
  feed.on('error', error => seen.push({ error: String(error) }))
  feed.follow()
  return { seen, feed }
}

async function scenario (url, Feed, name) {
  const ask = async (method, path, body) => {
    const answer = await fetch(`${url}/${path}`, { method, body: body && JSON.stringify(body) })
    if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status}`)
    return answer.json()
  }
  await ask('PUT', name)
  const { rev } = await ask('PUT', `${name}/a`, { color: 'red' })
  const feeds = [
    follow(Feed, { db: `${url}/${name}`, since: 0, include_docs: true }),
    // Each answer ends after one row, and the next request starts from there.
    follow(Feed, { db: `${url}/${name}`, since: 0, feed: 'longpoll', limit: 1 })
  ]
  const each = async expected => {
    for (const { seen } of feeds) await seen.next(expected)
  }
  await each({ id: 'a', changes: [{ rev }] })
  const second = await ask('PUT', `${name}/b`, {})
  await each({ id: 'b', changes: [{ rev: second.rev }] })
  const gone = await ask('DELETE', `${name}/a?rev=${rev}`)
  await each({ id: 'a', changes: [{ rev: gone.rev }], deleted: true })
  for (const { seen, feed } of feeds) {
    feed.stop()
    seen.end()
  }

  // This request names no position, so it gets all databases first.
  const all = follow(Feed, { db: `${url}/_db_updates` })
  const of = async type => {
    for (;;) {
      const row = await all.seen.next({})
      assert.equal(row.error, undefined)
      if (row.db_name === name) return assert.equal(row.type, type)
    }
  }
  await of('created')
  await of('updated')
  await ask('DELETE', name)
  await of('deleted')
  all.feed.stop()
}

run(async url => {
  for (const name of ['follow', 'cloudant-follow']) await scenario(url, require(name).Feed, name)
})
