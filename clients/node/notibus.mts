// Records events of databases for Notibus, inside your own FoundationDB transactions, from TypeScript or JavaScript on Node.
// Copy this file. Node 22.18 or newer runs it as it is, because its types can be erased; for JavaScript and older versions, `tsc`
// turns it into notibus.mjs.
//
//   import { Recorder, configKey } from "./notibus.mts";
//   const recorder = new Recorder(prefix, await db.get(configKey(prefix)));
//   await db.doTransaction(async (tn) => {
//     tn.set("documents/1", "{}");
//     recorder.record(tn, "shop/orders", instance, { updated: 1 });
//   });
//   await db.doTransaction(async (tn) => recorder.ring(tn, "shop/orders")); // a hint, which may fail
//
// docs/protocol.md says what is written and why. `node notibus.mts protocol-vectors.json` checks it.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

/** What a recorder does to a transaction. */
export interface Mutation {
  op: "add" | "set_versionstamped_value";
  key: Buffer;
  operand: Buffer;
}

/** How many times each event happens to a database in a transaction, and the ids of the design documents to name. */
export interface Events {
  created?: number;
  deleted?: number;
  updated?: number;
  ddoc_updated?: number;
  ddocs?: readonly string[];
}

/** A transaction of the package `foundationdb`. */
export interface Transaction {
  atomicOpNative(operation: number, key: Buffer, operand: Buffer): void;
}

const FORMAT = 6;
const SECRET = Buffer.from(
  "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221" +
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8" +
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb" +
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e",
  "hex",
);
const P32 = [0x9e3779b1n, 0x85ebca77n, 0xc2b2ae3dn];
const P64 = [0x9e3779b185ebca87n, 0xc2b2ae3d27d4eb4fn, 0x165667b19e3779f9n, 0x85ebca77c2b2ae63n, 0x27d4eb2f165667c5n];
const cut = (number: bigint): bigint => BigInt.asUintN(64, number);
const fold = (a: bigint, b: bigint): bigint => cut(a * b) ^ ((a * b) >> 64n);
const secret = (at: number): bigint => SECRET.readBigUInt64LE(at);

function avalanche(h: bigint): bigint {
  h = cut(h);
  h ^= h >> 37n;
  h = cut(h * 0x165667919e3779f9n);
  return h ^ (h >> 32n);
}

function avalanche64(h: bigint): bigint {
  h ^= h >> 33n;
  h = cut(h * P64[1]);
  h ^= h >> 29n;
  h = cut(h * P64[2]);
  return h ^ (h >> 32n);
}

/** 64-bit XXH3 with seed 0, for at most 1,024 bytes. */
export function xxh3(data: Buffer): bigint {
  const n = data.length;
  const size = BigInt(n);
  const u64 = (at: number): bigint => data.readBigUInt64LE(at);
  const u32 = (at: number): bigint => BigInt(data.readUInt32LE(at));
  const mix = (at: number, s: number): bigint => fold(u64(at) ^ secret(s), u64(at + 8) ^ secret(s + 8));
  if (n === 0) return avalanche64(secret(56) ^ secret(64));
  if (n <= 3) {
    const combined = (BigInt(data[0]) << 16n) | (BigInt(data[n >> 1]) << 24n) | BigInt(data[n - 1]) | (size << 8n);
    return avalanche64(combined ^ BigInt(SECRET.readUInt32LE(0)) ^ BigInt(SECRET.readUInt32LE(4)));
  }
  if (n <= 8) {
    let h = (u32(n - 4) + (u32(0) << 32n)) ^ secret(8) ^ secret(16);
    h ^= cut((h << 49n) | (h >> 15n)) ^ cut((h << 24n) | (h >> 40n));
    h = cut(h * 0x9fb21c651e98df25n);
    h ^= (h >> 35n) + size;
    h = cut(h * 0x9fb21c651e98df25n);
    return h ^ (h >> 28n);
  }
  if (n <= 16) {
    const low = u64(0) ^ secret(24) ^ secret(32);
    const high = u64(n - 8) ^ secret(40) ^ secret(48);
    const swapped = Buffer.alloc(8);
    swapped.writeBigUInt64LE(low);
    return avalanche(size + swapped.readBigUInt64BE() + high + fold(low, high));
  }
  let h = size * P64[0];
  if (n <= 128) {
    for (let i = 0; i <= (n - 1) >> 5; i++) h += mix(16 * i, 32 * i) + mix(n - 16 * (i + 1), 32 * i + 16);
    return avalanche(h);
  }
  if (n <= 240) {
    for (let i = 0; i < 8; i++) h += mix(16 * i, 16 * i);
    h = avalanche(h);
    for (let i = 8; i < n >> 4; i++) h += mix(16 * i, 16 * (i - 8) + 3);
    return avalanche(h + mix(n - 16, 119));
  }
  if (n > 1024) throw new RangeError("names have at most 1,024 bytes");
  const acc = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]];
  const stripe = (at: number, s: number): void => {
    for (let i = 0; i < 8; i++) {
      const value = u64(at + 8 * i);
      const key = value ^ secret(s + 8 * i);
      acc[i ^ 1] = cut(acc[i ^ 1] + value);
      acc[i] = cut(acc[i] + (key & 0xffffffffn) * (key >> 32n));
    }
  };
  for (let i = 0; i < (n - 1) >> 6; i++) stripe(64 * i, 8 * i);
  stripe(n - 64, 121);
  for (let i = 0; i < 4; i++) h += fold(acc[2 * i] ^ secret(11 + 16 * i), acc[2 * i + 1] ^ secret(19 + 16 * i));
  return avalanche(h);
}

/** The key of a tuple: non-negative integers, text, and byte strings. */
function pack(prefix: Buffer, ...elements: (number | string | Buffer)[]): Buffer {
  const bytes: number[] = [...prefix];
  for (const element of elements) {
    if (typeof element === "number") {
      const digits: number[] = [];
      for (let rest = element; rest > 0; rest = Math.floor(rest / 256)) digits.unshift(rest % 256);
      bytes.push(0x14 + digits.length, ...digits);
    } else {
      bytes.push(typeof element === "string" ? 2 : 1);
      const content = typeof element === "string" ? Buffer.from(element) : element;
      for (const byte of content) bytes.push(...(byte === 0 ? [0, 0xff] : [byte]));
      bytes.push(0);
    }
  }
  return Buffer.from(bytes);
}

/** The key of the configuration of a bus. */
export const configKey = (prefix: Buffer = Buffer.from("notibus")): Buffer => pack(prefix, 0);

/** Records events of one bus. */
export class Recorder {
  readonly prefix: Buffer;
  readonly partitions: number;

  /** `config` is the value at `configKey(prefix)`. */
  constructor(prefix: Buffer, config: Buffer | null | undefined) {
    if (!config) throw new Error("there is no bus under this prefix");
    if (config.length !== 7 || config.readUInt16BE(0) !== FORMAT)
      throw new Error(`the bus has another format than this recorder knows: ${FORMAT}`);
    this.prefix = prefix;
    this.partitions = config.readUInt32BE(2);
  }

  partition(name: string): number {
    return Number(xxh3(Buffer.from(name)) % BigInt(this.partitions));
  }

  /** The mutations of the transaction. Each id in `ddocs` counts as one more `ddoc_updated`. */
  mutations(name: string, instance: Buffer, events: Events, slot = 0): Mutation[] {
    const { created = 0, deleted = 0, updated = 0, ddoc_updated = 0, ddocs = [] } = events;
    // A lone surrogate cannot be encoded as UTF-8.
    const isUtf8 = (text: string) => Buffer.from(text).toString() === text;
    const isText = (text: string) => text !== "" && Buffer.byteLength(text) <= 1024 && isUtf8(text);
    if (!isText(name) || instance.length !== 16)
      throw new RangeError("a name has 1 to 1,024 bytes of UTF-8, and an instance 16");
    if (!ddocs.every(isText)) throw new RangeError("the id of a design document has 1 to 1,024 bytes of UTF-8");
    const operand = Buffer.alloc(40);
    [created, deleted, updated, ddoc_updated + ddocs.length, ddocs.length].forEach((lane, place) => {
      if (!Number.isInteger(lane) || lane < 0 || lane >= 2 ** 32) throw new RangeError("a lane is not below 2^32");
      operand.writeUInt32LE(lane, 8 * place);
    });
    const at = [1, this.partition(name), name, instance] as const;
    const stamps = ddocs.map((ddoc): Mutation => ({
      op: "set_versionstamped_value",
      key: pack(this.prefix, ...at, 2, ddoc),
      operand: Buffer.alloc(14),
    }));
    return [{ op: "add", key: pack(this.prefix, ...at, 0, slot), operand }, ...stamps];
  }

  /** Records events in the transaction `tn`. */
  record(tn: Transaction, name: string, instance: Buffer, events: Events, slot = 0): void {
    for (const mutation of this.mutations(name, instance, events, slot)) apply(tn, mutation);
  }

  /** The mutation that wakes the notifier. Apply it after the commit, in another transaction. */
  doorbell(name: string): Mutation {
    const operand = Buffer.alloc(8);
    operand.writeUInt32LE(1);
    return { op: "add", key: pack(this.prefix, 2, this.partition(name)), operand };
  }

  /** Rings the doorbell in the transaction `tn`. */
  ring(tn: Transaction, name: string): void {
    apply(tn, this.doorbell(name));
  }
}

/** The codes of the operations are those of the client library: ADD is 2, SET_VERSIONSTAMPED_VALUE is 15. */
function apply(tn: Transaction, { op, key, operand }: Mutation): void {
  tn.atomicOpNative(op === "add" ? 2 : 15, key, operand);
}

function check(path: string): void {
  const vectors = JSON.parse(readFileSync(path, "utf8"));
  const same = (found: unknown, wanted: unknown): void => {
    if (JSON.stringify(found) !== JSON.stringify(wanted))
      throw new Error(`${JSON.stringify(found)} is not ${JSON.stringify(wanted)}`);
  };
  const shown = ({ op, key, operand }: Mutation) => ({ op, key: key.toString("hex"), operand: operand.toString("hex") });
  for (const { name, xxh3_64 } of vectors.hashes) same(xxh3(Buffer.from(name)).toString(16).padStart(16, "0"), xxh3_64);
  for (const vector of vectors.records) {
    const prefix = Buffer.from(vector.prefix, "hex");
    const recorder = new Recorder(prefix, Buffer.from(vector.config, "hex"));
    const instance = Buffer.from(vector.instance, "hex");
    same(configKey(prefix).toString("hex"), vector.config_key);
    same(recorder.partition(vector.name), vector.partition);
    same(recorder.mutations(vector.name, instance, vector.events, vector.slot).map(shown), vector.mutations);
    same(shown(recorder.doorbell(vector.name)), vector.doorbell);
  }
  for (const config of vectors.refused_configs) {
    let refused = false;
    try {
      new Recorder(Buffer.from("notibus"), Buffer.from(config, "hex"));
    } catch {
      refused = true;
    }
    same(refused, true);
  }
  for (const ddoc of vectors.refused_ddocs) {
    let refused = false;
    try {
      const { prefix, config, name, instance } = vectors.records[0];
      const recorder = new Recorder(Buffer.from(prefix, "hex"), Buffer.from(config, "hex"));
      recorder.mutations(name, Buffer.from(instance, "hex"), { ddocs: [ddoc] });
    } catch {
      refused = true;
    }
    same(refused, true);
  }
  console.log(`${vectors.hashes.length} hashes, ${vectors.records.length} records: as they should be`);
}

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) check(process.argv[2]);
