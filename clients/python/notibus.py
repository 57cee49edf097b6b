"""Records events of databases for Notibus, inside your own FoundationDB transactions. Copy this file.

    import fdb, notibus
    fdb.api_version(710)
    db = fdb.open()
    recorder = notibus.Recorder(b"notibus", db[notibus.config_key(b"notibus")])

    @fdb.transactional
    def write(tr, instance, body):
        tr[b"documents/1"] = body
        recorder.record(tr, "shop/orders", instance, updated=1)

    write(db, instance, b"{}")
    recorder.ring(db.create_transaction(), "shop/orders")  # commit it; a hint, which may fail

docs/protocol.md says what is written and why. `python3 notibus.py protocol-vectors.json` checks it.
"""

import json
import struct
import sys

FORMAT = 6
M64 = (1 << 64) - 1
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def _u32(data, at):
    return struct.unpack_from("<I", data, at)[0]


def _u64(data, at):
    return struct.unpack_from("<Q", data, at)[0]


def _fold(a, b):
    product = a * b
    return (product & M64) ^ (product >> 64)


def _avalanche(h):
    h ^= h >> 37
    h = h * 0x165667919E3779F9 & M64
    return h ^ h >> 32


def _avalanche64(h):
    h ^= h >> 33
    h = h * P64[1] & M64
    h ^= h >> 29
    h = h * P64[2] & M64
    return h ^ h >> 32


def _mix(data, at, secret):
    return _fold(_u64(data, at) ^ _u64(SECRET, secret), _u64(data, at + 8) ^ _u64(SECRET, secret + 8))


def xxh3_64(data):
    """64-bit XXH3 with seed 0, for at most 1,024 bytes."""
    n = len(data)
    if n == 0:
        return _avalanche64(_u64(SECRET, 56) ^ _u64(SECRET, 64))
    if n <= 3:
        combined = data[0] << 16 | data[n >> 1] << 24 | data[n - 1] | n << 8
        return _avalanche64(combined ^ _u32(SECRET, 0) ^ _u32(SECRET, 4))
    if n <= 8:
        h = (_u32(data, n - 4) + (_u32(data, 0) << 32)) ^ _u64(SECRET, 8) ^ _u64(SECRET, 16)
        h ^= (h << 49 | h >> 15) & M64 ^ (h << 24 | h >> 40) & M64
        h = h * 0x9FB21C651E98DF25 & M64
        h ^= (h >> 35) + n
        h = h * 0x9FB21C651E98DF25 & M64
        return h ^ h >> 28
    if n <= 16:
        low = _u64(data, 0) ^ _u64(SECRET, 24) ^ _u64(SECRET, 32)
        high = _u64(data, n - 8) ^ _u64(SECRET, 40) ^ _u64(SECRET, 48)
        return _avalanche(n + int.from_bytes(low.to_bytes(8, "little"), "big") + high + _fold(low, high) & M64)
    if n <= 240:
        acc = n * P64[0]
        if n <= 128:
            for i in range((n - 1) // 32 + 1):
                acc += _mix(data, 16 * i, 32 * i) + _mix(data, n - 16 * (i + 1), 32 * i + 16)
        else:
            for i in range(8):
                acc += _mix(data, 16 * i, 16 * i)
            acc = _avalanche(acc & M64)
            for i in range(8, n // 16):
                acc += _mix(data, 16 * i, 16 * (i - 8) + 3)
            acc += _mix(data, n - 16, 119)
        return _avalanche(acc & M64)
    if n > 1024:
        raise ValueError("names have at most 1,024 bytes")
    acc = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]]
    stripes = [(64 * i, 8 * i) for i in range((n - 1) // 64)] + [(n - 64, 121)]
    for at, secret in stripes:
        for i in range(8):
            value = _u64(data, at + 8 * i)
            key = value ^ _u64(SECRET, secret + 8 * i)
            acc[i ^ 1] = acc[i ^ 1] + value & M64
            acc[i] = acc[i] + (key & 0xFFFFFFFF) * (key >> 32) & M64
    h = n * P64[0]
    for i in range(4):
        h += _fold(acc[2 * i] ^ _u64(SECRET, 11 + 16 * i), acc[2 * i + 1] ^ _u64(SECRET, 19 + 16 * i))
    return _avalanche(h & M64)


def _pack(prefix, *elements):
    """The key of a tuple: non-negative integers, text, and byte strings."""
    key = bytearray(prefix)
    for element in elements:
        if isinstance(element, int):
            digits = element.to_bytes((element.bit_length() + 7) // 8, "big")
            key += bytes([0x14 + len(digits)]) + digits
        else:
            tag, data = (b"\x02", element.encode()) if isinstance(element, str) else (b"\x01", element)
            key += tag + data.replace(b"\x00", b"\x00\xff") + b"\x00"
    return bytes(key)


def config_key(prefix=b"notibus"):
    """The key of the configuration of a bus."""
    return _pack(prefix, 0)


class Recorder:
    """Records events of one bus. `config` is the value at `config_key(prefix)`."""

    def __init__(self, prefix, config):
        if config is None:
            raise ValueError("there is no bus under this prefix")
        config = bytes(config)
        if len(config) != 7 or config[:2] != struct.pack(">H", FORMAT):
            raise ValueError("the bus has another format than this recorder knows: %d" % FORMAT)
        self.prefix = prefix
        self.partitions = struct.unpack(">I", config[2:6])[0]

    def partition(self, name):
        return xxh3_64(name.encode()) % self.partitions

    def mutations(self, name, instance, created=0, deleted=0, updated=0, ddoc_updated=0, ddocs=(), slot=0):
        """The mutations of the transaction: (operation, key, operand). Each id in `ddocs` counts as one more `ddoc_updated`."""
        if not 1 <= len(name.encode()) <= 1024 or len(instance) != 16:
            raise ValueError("a name has 1 to 1,024 bytes, and an instance 16")
        if not all(1 <= len(ddoc.encode()) <= 1024 for ddoc in ddocs):
            raise ValueError("the id of a design document has 1 to 1,024 bytes")
        lanes = (created, deleted, updated, ddoc_updated + len(ddocs), len(ddocs))
        if not all(0 <= lane < 1 << 32 for lane in lanes):
            raise ValueError("a lane is not below 2^32")
        at = (self.prefix, 1, self.partition(name), name, instance)
        found = [("add", _pack(*at, 0, slot), struct.pack("<5Q", *lanes))]
        return found + [("set_versionstamped_value", _pack(*at, 2, ddoc), bytes(14)) for ddoc in ddocs]

    def record(self, tr, name, instance, **events):
        """Records events in the transaction `tr` of the binding: `created=1`, `deleted=1`, `updated=3`, `ddocs=["_design/a"]`."""
        for operation, key, operand in self.mutations(name, instance, **events):
            getattr(tr, operation)(key, operand)

    def doorbell(self, name):
        """The mutation that wakes the notifier. Apply it after the commit, in another transaction."""
        return ("add", _pack(self.prefix, 2, self.partition(name)), struct.pack("<Q", 1))

    def ring(self, tr, name):
        """Rings the doorbell in the transaction `tr`."""
        operation, key, operand = self.doorbell(name)
        getattr(tr, operation)(key, operand)


def _check(path):
    with open(path, encoding="utf-8") as file:
        vectors = json.load(file)
    for vector in vectors["hashes"]:
        assert "%016x" % xxh3_64(vector["name"].encode()) == vector["xxh3_64"], vector
    for vector in vectors["records"]:
        prefix = bytes.fromhex(vector["prefix"])
        assert config_key(prefix).hex() == vector["config_key"], vector
        recorder = Recorder(prefix, bytes.fromhex(vector["config"]))
        name, events = vector["name"], vector["events"]
        assert recorder.partition(name) == vector["partition"], vector
        found = recorder.mutations(name, bytes.fromhex(vector["instance"]), slot=vector["slot"], **events)
        found = [{"op": op, "key": key.hex(), "operand": operand.hex()} for op, key, operand in found]
        assert found == vector["mutations"], (found, vector)
        op, key, operand = recorder.doorbell(name)
        assert {"op": op, "key": key.hex(), "operand": operand.hex()} == vector["doorbell"], vector
    for config in vectors["refused_configs"]:
        try:
            Recorder(b"notibus", bytes.fromhex(config))
        except ValueError:
            continue
        raise AssertionError("the configuration %r was not refused" % config)
    for ddoc in vectors["refused_ddocs"]:
        vector = vectors["records"][0]
        recorder = Recorder(bytes.fromhex(vector["prefix"]), bytes.fromhex(vector["config"]))
        try:
            recorder.mutations(vector["name"], bytes.fromhex(vector["instance"]), ddocs=[ddoc])
        except ValueError:
            continue
        raise AssertionError("the id %r was not refused" % ddoc)
    print("%d hashes, %d records: as they should be" % (len(vectors["hashes"]), len(vectors["records"])))


if __name__ == "__main__":
    _check(sys.argv[1])
