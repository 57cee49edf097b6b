// A page of another origin in a real browser, which uses PouchDB as web pages load it, and the browser's own EventSource.
//
// This process serves the page on the socket that it gets as standard input; the server knows this origin. The page posts its result back
// to the same origin.

const assert = require('node:assert/strict')
const { spawn } = require('node:child_process')
const fs = require('node:fs')
const http = require('node:http')
const os = require('node:os')
const path = require('node:path')
const { run } = require('./seen')

/** The time limit of the page, in ms. */
const PATIENCE = 100_000

/** The script of the page. It runs in the browser, and uses nothing else from this file. */
async function scenario (url) {
  const check = (actual, expected) => {
    const [found, wanted] = [actual, expected].map(value => JSON.stringify(value))
    if (found !== wanted) throw new Error(`${found} is not ${wanted}`)
  }
  /** A queue of rows. */
  const queue = () => {
    const [rows, waiting] = [[], []]
    return {
      push: row => waiting.length ? waiting.shift()(row) : rows.push(row),
      next: () => rows.length ? rows.shift() : new Promise(resolve => waiting.push(resolve))
    }
  }
  if (new URL(url).origin === location.origin) throw new Error('the page is of the same origin')
  const updates = queue()
  const source = new EventSource(`${url}/_db_updates?feed=eventsource&since=now&heartbeat=1000`)
  const opened = queue()
  source.onopen = opened.push
  source.onmessage = event => updates.push({ ...JSON.parse(event.data), id: JSON.parse(event.lastEventId) })
  await opened.next()

  const db = new PouchDB(`${url}/people`, { adapter: 'http' })
  check((await db.info()).doc_count, 0)
  const changes = queue()
  const feed = db.changes({ live: true, since: 0, include_docs: true, heartbeat: 1000 })
  feed.on('change', changes.push).on('error', error => changes.push({ error: String(error) }))
  const ada = await db.put({ _id: 'ada', born: 1815 })
  const first = await changes.next()
  check([first.id, first.changes, first.doc.born], ['ada', [{ rev: ada.rev }], 1815])
  const gone = await db.remove('ada', ada.rev)
  const second = await changes.next()
  check([second.id, second.changes, second.deleted], ['ada', [{ rev: gone.rev }], true])
  feed.cancel()
  await db.destroy()
  const types = []
  while (types.at(-1) !== 'deleted') {
    const row = await updates.next()
    check([row.db_name, row.id], ['people', row.seq])
    types.push(row.type)
  }
  check([types[0], types.slice(1, -1).every(type => type === 'updated')], ['created', true])
  source.close()

  // A page sees only the headers that the server exposes, and the browser sends a preflight before a request that is not simple.
  const answer = await fetch(`${url}/_db_updates`, { headers: { 'If-None-Match': 'x', Accept: 'application/json' } })
  check([answer.status, answer.headers.get('etag') !== null], [200, true])
}

const page = url => `<!doctype html><meta charset="utf-8"><script src="/pouchdb.js"></script><script>
const tell = text => fetch('/end', { method: 'POST', body: text })
;(${scenario})(${JSON.stringify(url)}).then(() => tell('ok'), error => tell(String(error.stack || error)))
</script>`

run(async url => {
  const pouchdb = require.resolve('pouchdb/dist/pouchdb.min.js')
  const profile = fs.mkdtempSync(path.join(os.tmpdir(), 'notibus-browser-'))
  let browser
  try {
    const end = await new Promise((resolve, reject) => {
      const server = http.createServer((request, response) => {
        if (request.method === 'POST') {
          let text = ''
          request.on('data', data => { text += data }).on('end', () => resolve(text))
          return response.end()
        }
        const isScript = request.url === '/pouchdb.js'
        response.setHeader('content-type', isScript ? 'text/javascript' : 'text/html')
        response.end(isScript ? fs.readFileSync(pouchdb) : page(url))
      })
      server.listen({ fd: 0 }, () => {
        const origin = `http://127.0.0.1:${server.address().port}/`
        const flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run']
        const debug = ['--remote-debugging-port=0', `--user-data-dir=${profile}`]
        browser = spawn(process.env.NOTIBUS_BROWSER, [...flags, ...debug, origin], { stdio: 'ignore', detached: true })
        browser.on('error', reject).on('exit', code => reject(new Error(`the browser has ended: ${code}`)))
      })
      setTimeout(() => reject(new Error('the page has not come to its end')), PATIENCE).unref()
    })
    assert.equal(end, 'ok')
  } finally {
    browser?.removeAllListeners('exit')
    if (browser?.exitCode === null) {
      const ended = new Promise(resolve => browser.on('exit', resolve))
      // This kills the helper processes as well: they would continue to write to the profile.
      process.kill(-browser.pid, 'SIGKILL')
      await ended
    }
    fs.rmSync(profile, { recursive: true, force: true, maxRetries: 20 })
  }
})
