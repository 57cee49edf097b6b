// Each client that follows `_db_updates`, on `notibus serve` with a file of secrets: nano with its cookie, the others with Basic.

const assert = require('node:assert/strict')
const { once } = require('node:events')
const { createInterface } = require('node:readline')
const { BasicAuthenticator, CloudantV1 } = require('@ibm-cloud/cloudant')
const { EventSource } = require('eventsource')
const nano = require('nano')
const { Seen, poll, run } = require('./seen')

const NAME = 'anna'
const SECRET = process.env.NOTIBUS_SECRET
const AUTHORIZATION = `Basic ${Buffer.from(`${NAME}:${SECRET}`).toString('base64')}`

/** Follows a continuous feed of `limit` rows with nano. */
function stream (couch, since, limit) {
  const seen = new Seen()
  const qs = { feed: 'continuous', since, limit, heartbeat: 100 }
  const lines = createInterface({ input: couch.relax({ db: '_db_updates', qs, stream: true }) })
  lines.on('line', line => line && 'db_name' in JSON.parse(line) && seen.push(JSON.parse(line)))
  const done = once(lines, 'close')
  return { seen, end: () => done }
}

/** Follows with follow or cloudant-follow. */
function follow (name, url) {
  const seen = new Seen()
  const { Feed } = require(name)
  const feed = new Feed({ db: `${url.replace('//', `//${NAME}:${SECRET}@`)}/_db_updates`, heartbeat: 10_000 })
  feed.on('change', row => seen.push(row))
  feed.on('error', error => seen.push({ error: String(error) }))
  feed.follow()
  return { seen, end: () => feed.stop() }
}

function events (url, since) {
  const seen = new Seen()
  const authorized = (input, init) => fetch(input, { ...init, headers: { ...init.headers, authorization: AUTHORIZATION } })
  const query = new URLSearchParams({ feed: 'eventsource', since, heartbeat: '100' })
  const source = new EventSource(`${url}/_db_updates?${query}`, { fetch: authorized })
  source.onmessage = event => seen.push(JSON.parse(event.data))
  return { seen, end: () => source.close() }
}

run(async url => {
  const couch = nano({ url, requestDefaults: { jar: true } })
  await assert.rejects(couch.updates({}), { statusCode: 401 })
  await assert.rejects(couch.auth(NAME, 'wrong'), { statusCode: 401 })
  assert.equal((await couch.auth(NAME, SECRET)).ok, true)
  const service = new CloudantV1({ authenticator: new BasicAuthenticator({ username: NAME, password: SECRET }) })
  service.setServiceUrl(url)

  const start = (await couch.updates({ since: 'now' })).last_seq
  const clients = [
    poll(couch, start),
    stream(couch, start, 4),
    // These two clients name no position; there is no database yet.
    follow('follow', url),
    follow('cloudant-follow', url),
    events(url, start)
  ]
  const step = async (db, type) => {
    const headers = { authorization: AUTHORIZATION, 'content-type': 'application/json' }
    const body = JSON.stringify([{ db, type }])
    const answer = await fetch(`${url}/_notibus/events`, { method: 'POST', headers, body })
    assert.equal(answer.status, 201, await answer.text())
    for (const { seen } of clients) await seen.next({ db_name: db, type })
  }
  await step('one', 'created')
  await step('one', 'updated')
  await step('two/part', 'created')
  await step('one', 'deleted')
  for (const { seen, end } of clients) {
    await end()
    seen.end()
  }
  const { result } = await service.getDbUpdates({ since: start, feed: 'longpoll' })
  assert.deepEqual(result.results.map(row => [row.dbName, row.type]), [['two/part', 'created'], ['one', 'deleted']])
  assert.deepEqual(await couch.db.list(), ['two/part'])
})
