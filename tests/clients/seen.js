// The rows that a client has seen. They wait here until the script compares them with what was done.

const assert = require('node:assert/strict')

/** The time limit for a row, in ms. */
const PATIENCE = 30_000

class Seen {
  constructor () {
    this.rows = []
    this.waiting = null
  }

  push (row) {
    if (this.waiting) {
      const resolve = this.waiting
      this.waiting = null
      resolve(row)
    } else {
      this.rows.push(row)
    }
  }

  /** Returns the next row, which must match `expected`. */
  async next (expected) {
    const row = this.rows.shift() ?? await this.wait(expected)
    for (const [key, value] of Object.entries(expected)) assert.deepEqual(row[key], value, JSON.stringify(row))
    return row
  }

  /** Fails if there are further rows. */
  end () {
    assert.deepEqual(this.rows, [])
  }

  wait (expected) {
    return new Promise((resolve, reject) => {
      const late = new Error(`nothing came, but should: ${JSON.stringify(expected)}`)
      const timer = setTimeout(() => reject(late), PATIENCE)
      this.waiting = row => {
        clearTimeout(timer)
        resolve(row)
      }
    })
  }
}

/** Sends long polls with nano until `end` is called. */
function poll (couch, since) {
  const seen = new Seen()
  const stop = new AbortController()
  const work = async () => {
    while (!stop.signal.aborted) {
      const page = await couch.updates({ feed: 'longpoll', since, timeout: 500 })
      page.results.forEach(row => seen.push(row))
      since = page.last_seq
    }
  }
  const done = work()
  return { seen, end: () => { stop.abort(); return done } }
}

/** Runs a scenario on the server that the command line names; the exit code says how it ended. */
function run (scenario) {
  scenario(process.argv[2]).then(() => process.exit(0), error => {
    console.error(error)
    process.exit(1)
  })
}

module.exports = { Seen, poll, run }
