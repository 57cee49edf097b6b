// nano: follows `_db_updates` by long polls and as a stream, and a database by its ChangesReader.

const assert = require('node:assert/strict')
const { once } = require('node:events')
const { createInterface } = require('node:readline')
const nano = require('nano')
const { Seen, poll, run } = require('./seen')

/** Follows one continuous feed of `limit` rows. */
function stream (couch, since, limit) {
  const seen = new Seen()
  const qs = { feed: 'continuous', since, limit, heartbeat: 100 }
  const input = couch.relax({ db: '_db_updates', qs, stream: true })
  const lines = createInterface({ input })
  lines.on('line', line => line && seen.push(JSON.parse(line)))
  return { seen, done: once(lines, 'close') }
}

async function databases (couch) {
  const start = await couch.updates({ since: 'now' })
  assert.deepEqual(start.results, [])
  const polled = poll(couch, start.last_seq)
  const streamed = stream(couch, start.last_seq, 5)
  // Each step waits until both readers have seen it, so that no two events are delivered as one.
  const both = async (type, name) => {
    const row = await polled.seen.next({ db_name: name, type })
    await streamed.seen.next(row)
    return row
  }

  await couch.db.create('one')
  await both('created', 'one')
  await couch.use('one').insert({ n: 1 }, 'x')
  await both('updated', 'one')
  await couch.db.create('two/part')
  await both('created', 'two/part')
  await couch.db.destroy('one')
  await both('deleted', 'one')
  await couch.use('two/part').bulk({ docs: [{ _id: 'a' }, { _id: 'b' }] })
  const last = await both('updated', 'two/part')

  await streamed.done
  await streamed.seen.next({ last_seq: last.seq })
  await polled.end()
  polled.seen.end()
  streamed.seen.end()

  // A late reader receives each database and type of event once.
  const late = await couch.updates({ since: start.last_seq })
  const delivered = late.results.map(row => [row.db_name, row.type])
  assert.deepEqual(delivered, [['one', 'deleted'], ['two/part', 'created'], ['two/part', 'updated']])
  assert.equal(late.last_seq, last.seq)
  const again = await couch.updates({ since: last.seq })
  assert.deepEqual(again.results, [])
}

async function documents (couch) {
  await couch.db.create('docs')
  const docs = couch.use('docs')
  const first = await docs.insert({ n: 1 }, 'x')

  const reader = docs.changesReader
  const live = new Seen()
  reader.start({ since: (await docs.info()).update_seq, timeout: 500, includeDocs: true })
    .on('change', row => live.push(row))
    .on('error', error => live.push({ error }))
  const second = await docs.insert({ _rev: first.rev, n: 2 }, 'x')
  const edited = await live.next({ id: 'x', changes: [{ rev: second.rev }] })
  assert.deepEqual(edited.doc, { _id: 'x', _rev: second.rev, n: 2 })
  await assert.rejects(docs.insert({ _rev: first.rev, n: 3 }, 'x'), { statusCode: 409 })
  const view = { map: 'function (doc) { emit(doc.n) }' }
  const design = await docs.insert({ views: { view } }, '_design/views')
  await live.next({ id: '_design/views', changes: [{ rev: design.rev }] })
  const gone = await docs.destroy('x', second.rev)
  await live.next({ id: 'x', changes: [{ rev: gone.rev }], deleted: true })
  reader.stop()
  live.end()

  // Reads everything from the start, as pages and as a stream.
  const ids = ['_design/views', 'x']
  for (const read of [{ since: '0', timeout: 100, batchSize: 1 }, null]) {
    const reader = couch.use('docs').changesReader
    const rows = []
    const feed = read ? reader.get(read) : reader.spool({ since: '0' })
    feed.on('batch', batch => rows.push(...batch))
    const [lastSeq] = await once(feed, 'end')
    assert.deepEqual(rows.map(row => row.id), ids)
    assert.equal(lastSeq, rows.at(-1).seq)
  }

  const left = await docs.list({ include_docs: true })
  assert.deepEqual(left.rows.map(row => row.id), ['_design/views'])
  await couch.db.destroy('docs')
  await assert.rejects(docs.info(), { statusCode: 404 })
  assert.deepEqual(await couch.db.list(), ['two/part'])
}

run(async url => {
  const couch = nano(url)
  await databases(couch)
  await documents(couch)
})
