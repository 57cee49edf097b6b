// IBM's client: a ChangesFollower that reads everything and ends, which needs `pending` to reach 0, and one that listens.

const assert = require('node:assert/strict')
const { BasicAuthenticator, CloudantV1, ChangesFollower } = require('@ibm-cloud/cloudant')
const { Seen, run } = require('./seen')

/** A text so large that it takes more than one request to read the documents. */
const TEXT = 'x'.repeat(90_000)

/** Returns all rows of a follower that ends by itself, and the value of `pending` in each answer. */
async function readAll (service, params) {
  const rows = []
  const pending = []
  const counting = Object.create(service, {
    postChanges: {
      value: async params => {
        const answer = await service.postChanges(params)
        pending.push(answer.result.pending)
        return answer
      }
    }
  })
  for await (const row of new ChangesFollower(counting, params, 0).startOneOff()) rows.push(row)
  return { rows, pending }
}

run(async url => {
  const service = new CloudantV1({ authenticator: new BasicAuthenticator({ username: 'anybody', password: 'x' }) })
  service.setServiceUrl(url)
  const db = 'orders'
  const start = (await service.getDbUpdates({ since: 'now' })).result
  await service.putDatabase({ db })
  assert.deepEqual(await readAll(service, { db }), { rows: [], pending: [0] })

  const ids = Array.from({ length: 60 }, (_, n) => `order ${String(n).padStart(2, '0')}`)
  const docs = ids.map(_id => ({ _id, text: TEXT }))
  const written = (await service.postBulkDocs({ db, bulkDocs: { docs } })).result
  assert.ok(written.every(row => row.ok))
  // The client asks for as many documents at once as amount to 5 MB, by the sizes that the database reports.
  const { rows, pending } = await readAll(service, { db, includeDocs: true })
  assert.deepEqual(rows.map(row => row.id), ids)
  assert.ok(rows.every(row => row.doc.text === TEXT))
  assert.deepEqual(pending, [3, 0])
  const idsOf = async params => (await readAll(service, { db, ...params })).rows.map(row => row.id)
  assert.deepEqual(await idsOf({ since: rows[56].seq }), ids.slice(57))
  assert.deepEqual(await idsOf({ limit: 7 }), ids.slice(0, 7))

  const live = new Seen()
  const follower = new ChangesFollower(service, { db, since: rows.at(-1).seq }, 0)
  follower.start().on('data', row => live.push(row)).on('error', error => live.push({ error }))
  const edited = (await service.putDocument({ db, docId: ids[0], document: { _rev: rows[0].changes[0].rev, n: 1 } })).result
  await live.next({ id: ids[0], changes: [{ rev: edited.rev }] })
  const gone = (await service.deleteDocument({ db, docId: ids[1], rev: rows[1].changes[0].rev })).result
  await live.next({ id: ids[1], changes: [{ rev: gone.rev }], deleted: true })
  follower.stop()
  live.end()

  // The last edits may be delivered with the creation, or separately.
  const delivered = []
  let since = start.lastSeq
  const updates = async type => {
    do {
      const { results, lastSeq } = (await service.getDbUpdates({ since, feed: 'longpoll' })).result
      delivered.push(...results.map(row => [row.dbName, row.type]))
      since = lastSeq
    } while (!delivered.some(([, delivered]) => delivered === type))
  }
  await updates('created')
  await service.deleteDatabase({ db })
  await updates('deleted')
  assert.deepEqual(delivered.filter(([, type]) => type !== 'updated'), [[db, 'created'], [db, 'deleted']])
  await assert.rejects(readAll(service, { db }), { code: 404 })
})
