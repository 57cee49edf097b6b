// nano: logs in, and then follows with the cookie that it got.

const assert = require('node:assert/strict')
const nano = require('nano')
const { run } = require('./seen')

run(async url => {
  const couch = nano({ url, requestDefaults: { jar: true } })
  await assert.rejects(couch.updates({}), { statusCode: 401 })
  await assert.rejects(couch.auth('anna', 'wrong'), { statusCode: 401 })
  const answer = await couch.auth('anna', '0123456789abcdef0123456789abcdef')
  assert.deepEqual([answer.ok, answer.name], [true, 'anna'])
  const session = await couch.session()
  assert.equal(session.userCtx.name, 'anna')
  await couch.db.create('one')
  const { results } = await couch.updates({ feed: 'longpoll', since: '0', timeout: 5000 })
  assert.deepEqual(results.map(row => [row.db_name, row.type]), [['one', 'created']])
})
