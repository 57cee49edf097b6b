// PouchDB's HTTP adapter: creates a database by opening it, and follows its live changes.

const assert = require('node:assert/strict')
const PouchDB = require('pouchdb-core').plugin(require('pouchdb-adapter-http'))
const { Seen, run } = require('./seen')

/** Follows live changes; each change becomes a row in `seen`. */
function follow (db, options) {
  const seen = new Seen()
  const feed = db.changes({ live: true, include_docs: true, heartbeat: 100, ...options })
  feed.on('change', row => seen.push(row))
  feed.on('error', error => seen.push({ error }))
  return { seen, feed }
}

run(async url => {
  const db = new PouchDB(`${url}/people%2Fall`, { adapter: 'http' })
  assert.equal((await db.info()).doc_count, 0)
  const ada = await db.put({ _id: 'ada', born: 1815 })

  const fromZero = follow(db, { since: 0 })
  await fromZero.seen.next({ id: 'ada', changes: [{ rev: ada.rev }] })
  // For PouchDB, "now" is the position that `info` returns, so nothing may be edited before that call.
  const { info } = db
  const asked = new Promise(resolve => {
    db.info = () => info.call(db).finally(resolve)
  })
  const fromNow = follow(db, { since: 'now' })
  await asked
  const both = async expected => {
    const row = await fromZero.seen.next(expected)
    await fromNow.seen.next({ seq: row.seq, ...expected })
    return row
  }

  const later = await db.put({ _id: 'ada', _rev: ada.rev, born: 1815, died: 1852 })
  const row = await both({ id: 'ada', changes: [{ rev: later.rev }] })
  assert.deepEqual(row.doc, { _id: 'ada', _rev: later.rev, born: 1815, died: 1852 })
  await assert.rejects(db.put({ _id: 'ada', _rev: ada.rev }), { status: 409 })
  const [alan, bad] = await db.bulkDocs([{ _id: 'alan' }, { _id: 'ada' }])
  assert.equal(bad.error, 'conflict')
  await both({ id: 'alan', changes: [{ rev: alan.rev }] })
  const posted = await db.post({ name: 'nobody' })
  await both({ id: posted.id })
  const design = await db.put({ _id: '_design/views', views: {} })
  await both({ id: '_design/views', changes: [{ rev: design.rev }] })
  const gone = await db.remove('ada', later.rev)
  await both({ id: 'ada', changes: [{ rev: gone.rev }], deleted: true })
  await assert.rejects(db.get('ada'), { status: 404, reason: 'deleted' })
  for (const { seen, feed } of [fromZero, fromNow]) {
    feed.cancel()
    seen.end()
  }

  // Reads each document once, in pages of one row.
  const all = await db.changes({ since: 0, batch_size: 1 })
  assert.deepEqual(all.results.map(row => row.id), ['alan', posted.id, '_design/views', 'ada'])
  const some = await db.allDocs({ keys: ['alan', 'nobody', 'ada'] })
  assert.deepEqual(some.rows.map(row => row.error ?? row.value.deleted ?? row.id), ['alan', 'not_found', true])

  // A follower learns that its database is gone, unless PouchDB itself deleted it.
  const last = follow(db, { since: all.last_seq })
  assert.equal((await fetch(`${url}/people%2Fall`, { method: 'DELETE' })).status, 200)
  const { error } = await last.seen.next({})
  assert.equal(error.status, 404)
  const again = new PouchDB(`${url}/people%2Fall`, { adapter: 'http' })
  assert.equal((await again.info()).doc_count, 0)
  await again.destroy()
  assert.deepEqual(await (await fetch(`${url}/_all_dbs`)).json(), [])
})
