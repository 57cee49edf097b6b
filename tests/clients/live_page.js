// The live page in a real browser, which takes its commands through a pipe. The script prints a word per line, on which the test acts:
// "seen" (the page shows everything: let the notifier die) and "red" (the page has turned red: start another notifier).
//
// If NOTIBUS_SCREENSHOTS names a folder, the script saves the pictures of the page for docs/ there.

const assert = require('node:assert/strict')
const { spawn } = require('node:child_process')
const fs = require('node:fs')
const os = require('node:os')
const path = require('node:path')

/** The time limit of the whole script, in ms. */
const PATIENCE = process.env.NOTIBUS_SCREENSHOTS ? 200_000 : 90_000

/** A headless browser that takes commands through a pipe. */
class Browser {
  constructor (profile) {
    const flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run', '--hide-scrollbars']
    const debug = ['--remote-debugging-pipe', `--user-data-dir=${profile}`, 'about:blank']
    this.process = spawn(process.env.NOTIBUS_BROWSER, [...flags, ...debug], { stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'], detached: true })
    this.ended = new Promise(resolve => this.process.on('exit', resolve).on('error', resolve))
    this.process.stdio[3].on('error', () => {})
    this.waiting = new Map()
    this.requests = []
    this.count = 0
    let rest = ''
    this.process.stdio[4].on('data', data => {
      const messages = (rest + data).split('\0')
      rest = messages.pop()
      messages.map(message => JSON.parse(message)).forEach(message => this.handle(message))
    })
  }

  handle ({ id, result, error, method, params }) {
    if (method === 'Network.requestWillBeSent') this.requests.push(params.request.url)
    const waits = this.waiting.get(id)
    this.waiting.delete(id)
    if (error) waits?.reject(new Error(error.message)); else waits?.resolve(result)
  }

  tell (method, params = {}) {
    const id = ++this.count
    this.process.stdio[3].write(JSON.stringify({ id, method, params, sessionId: this.session }) + '\0')
    return Promise.race([
      new Promise((resolve, reject) => this.waiting.set(id, { resolve, reject })),
      this.ended.then(code => { throw new Error(`the browser has ended: ${code}`) })
    ])
  }

  async open (url) {
    const { targetId } = await this.tell('Target.createTarget', { url: 'about:blank' })
    this.session = (await this.tell('Target.attachToTarget', { targetId, flatten: true })).sessionId
    await this.tell('Network.enable')
    await this.tell('Emulation.setDeviceMetricsOverride', { width: 1200, height: 760, deviceScaleFactor: 1, mobile: false })
    await this.tell('Page.navigate', { url })
    // Until the new page is loaded, an expression would run in the previous page, or in an incomplete one.
    const isThere = 'document.readyState === "complete" && document.getElementById("feed") !== null'
    while (!await this.ask(isThere).catch(() => false)) await new Promise(resolve => setTimeout(resolve, 50))
  }

  /** Returns the value of an expression in the page. */
  async ask (expression) {
    const { result, exceptionDetails } = await this.tell('Runtime.evaluate', { expression, awaitPromise: true, returnByValue: true })
    assert.equal(exceptionDetails, undefined, expression)
    return result.value
  }

  /** Waits until an expression in the page is true. */
  async until (expression) {
    while (!await this.ask(expression)) await new Promise(resolve => setTimeout(resolve, 50))
  }

  async picture (name, scheme) {
    await this.tell('Emulation.setEmulatedMedia', { features: [{ name: 'prefers-color-scheme', value: scheme }] })
    await this.ask('draw()')
    const { data } = await this.tell('Page.captureScreenshot', { format: 'png' })
    const picture = Buffer.from(data, 'base64')
    assert.ok(picture.length > 5_000, 'there is something to see')
    if (process.env.NOTIBUS_SCREENSHOTS) fs.writeFileSync(path.join(process.env.NOTIBUS_SCREENSHOTS, name), picture)
    return picture
  }
}

/** An expression for the number of pixels that are drawn in the plot. */
const DRAWN = `(() => {
  const plot = document.getElementById("plot"), { data } = plot.getContext("2d").getImageData(0, 0, plot.width, plot.height)
  let drawn = 0
  for (let place = 3; place < data.length; place += 4) if (data[place]) drawn++
  return drawn
})()`

const STATE = 'document.getElementById("state")'

async function watch (url, browser) {
  const record = async events => {
    const answer = await fetch(`${url}/_notibus/events`, { method: 'POST', body: JSON.stringify(events) })
    assert.equal(answer.status, 201, await answer.text())
  }
  await browser.open(`${url}/_notibus/`)
  await browser.until(`${STATE}.className === "good" && ${STATE}.textContent === "ready"`)
  await browser.until('document.getElementById("feed").textContent === "following"')
  // The plot needs two rates for a line. Events that are recorded from now on must appear in it.
  await browser.until('points.length > 1')
  const names = ['shop/orders', 'shop/carts', 'people', '_replicator', 'logs/2026', '<b>bold</b>']
  await record(names.map(db => ({ db, type: 'created' })))
  const shown = name => `[...document.querySelectorAll("#rows tr")].some(tr => tr.children[1].textContent === ${JSON.stringify(name)})`
  for (const name of names) await browser.until(shown(name))
  assert.equal(await browser.ask('document.querySelector("#rows b") === null'), true, 'names are text')
  // Records enough events for a picture.
  const busy = setInterval(() => {
    const events = Array.from({ length: 1 + Math.floor(Math.random() * 8) }, (_, n) => ({ db: names[n % 5], type: 'updated' }))
    record(events).catch(() => {})
  }, 200)
  await browser.until('points.some(point => point.events > 0 && point.deliveries > 0)')
  await browser.until(`points.length > ${process.env.NOTIBUS_SCREENSHOTS ? 30 : 3}`)
  assert.ok(await browser.ask(DRAWN) > 100, 'the plot has lines')
  await browser.until('document.getElementById("nodes").children.length === 2')
  await browser.until('document.getElementById("consumers").textContent.includes("mailer")')
  await browser.until('document.getElementById("latency").textContent.includes(" ms")')
  await browser.until('document.getElementById("topology").textContent.includes("4 (1 to 4)open")')
  const [light, dark] = [await browser.picture('live-light.png', 'light'), await browser.picture('live-dark.png', 'dark')]
  assert.notDeepEqual(light, dark)
  assert.equal(await browser.ask('document.body.textContent.includes("NaN")'), false, 'each number is one')
  clearInterval(busy)

  // With the keyboard alone: text that is typed into the focused filter hides all other rows.
  await browser.ask('document.getElementById("filter").focus()')
  await browser.tell('Input.insertText', { text: 'people' })
  assert.equal(await browser.ask('[...document.querySelectorAll("#rows tr")].every(tr => tr.hidden === (tr.dataset.name !== "people"))'), true)

  console.log('seen')
  await browser.until(`${STATE}.className === "bad" && ${STATE}.textContent.includes("No live notifier owns 64 of the partitions")`)
  assert.notEqual(await browser.ask(`getComputedStyle(${STATE}).color`), await browser.ask('getComputedStyle(document.body).color'))
  await browser.picture('live-red.png', 'light')
  console.log('red')
  await browser.until(`${STATE}.className === "good"`)
  const elsewhere = browser.requests.filter(request => !request.startsWith(url) && !request.startsWith('data:'))
  assert.deepEqual(elsewhere, [], 'it asks nobody else')
}

(async () => {
  const profile = fs.mkdtempSync(path.join(os.tmpdir(), 'notibus-browser-'))
  const browser = new Browser(profile)
  const late = new Promise((resolve, reject) => {
    setTimeout(async () => {
      const page = await Promise.race([browser.ask('document.body.innerText').catch(String), new Promise(resolve => setTimeout(resolve, 2_000))])
      reject(new Error(`the page has not come to its end; it shows:\n${page}`))
    }, PATIENCE).unref()
  })
  try {
    await Promise.race([watch(process.argv[2], browser), late])
  } finally {
    if (browser.process.exitCode === null) {
      // This kills the helper processes as well: they would continue to write to the profile.
      process.kill(-browser.process.pid, 'SIGKILL')
      await browser.ended
    }
    fs.rmSync(profile, { recursive: true, force: true, maxRetries: 20 })
  }
  process.exit()
})().catch(error => {
  console.error(error)
  process.exit(1)
})
