//! Records events of databases for Notibus, inside your own FoundationDB transactions, without the crate `notibus` and without other
//! crates. Copy this file as a module, up to the line that says so.
//!
//! ```text
//! let config = trx.get(&notibus::config_key(PREFIX), true).await?.ok_or("there is no bus")?;
//! let recorder = notibus::Recorder::new(PREFIX, &config)?;
//! trx.set(key, document);
//! for notibus::Mutation { op, key, operand } in recorder.mutations("shop/orders", &instance, &events, 0)? {
//!     trx.atomic_op(&key, &operand, match op {
//!         notibus::Op::Add => MutationType::Add,
//!         notibus::Op::SetVersionstampedValue => MutationType::SetVersionstampedValue,
//!     });
//! }
//! // After the commit, recorder.doorbell("shop/orders") in another transaction: a hint, which may fail.
//! ```
//!
//! `docs/protocol.md` says what is written and why. As a program, this file answers the questions of `tests/protocol.rs`, one line each.

const FORMAT: u16 = 6;

/// The operation of a mutation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Add,
    SetVersionstampedValue,
}

/// One mutation of the transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mutation {
    pub op: Op,
    pub key: Vec<u8>,
    pub operand: Vec<u8>,
}

/// How many events of each kind happened to a database. Each id in `ddocs` counts as one more `ddoc_updated`.
#[derive(Debug, Clone, Default)]
pub struct Events<'a> {
    pub created: u64,
    pub deleted: u64,
    pub updated: u64,
    pub ddoc_updated: u64,
    pub ddocs: Vec<&'a str>,
}

/// Records events of one bus.
#[derive(Debug, Clone)]
pub struct Recorder {
    prefix: Vec<u8>,
    partitions: u32,
}

impl Recorder {
    /// The recorder of a bus; `config` is the value at [`config_key`].
    pub fn new(prefix: &[u8], config: &[u8]) -> Result<Self, String> {
        match config {
            [a, b, partitions @ .., _] if config.len() == 7 && u16::from_be_bytes([*a, *b]) == FORMAT => {
                let partitions = u32::from_be_bytes(partitions.try_into().expect("4 of 7 bytes"));
                Ok(Self { prefix: prefix.to_vec(), partitions })
            }
            _ => Err(format!("there is no bus under this prefix, or one of another format than {FORMAT}")),
        }
    }

    /// The partition of a database.
    pub fn partition(&self, name: &str) -> u64 {
        xxh3(name.as_bytes()) % u64::from(self.partitions)
    }

    /// The mutations of the transaction.
    pub fn mutations(
        &self,
        name: &str,
        instance: &[u8],
        events: &Events<'_>,
        slot: u64,
    ) -> Result<Vec<Mutation>, String> {
        if name.is_empty() || name.len() > 1_024 || instance.len() != 16 {
            return Err("a name has 1 to 1,024 bytes, and an instance 16".to_owned());
        }
        if events.ddocs.iter().any(|ddoc| ddoc.is_empty() || ddoc.len() > 1_024) {
            return Err("the id of a design document has 1 to 1,024 bytes".to_owned());
        }
        let ids = events.ddocs.len() as u64;
        let lanes = [events.created, events.deleted, events.updated, events.ddoc_updated + ids, ids];
        if lanes.iter().any(|lane| lane >> 32 != 0) {
            return Err("a lane is not below 2^32".to_owned());
        }
        let key = |part: u64, last: Element<'_>| {
            let (partition, name) = (Element::Number(self.partition(name)), Element::Text(name));
            let place =
                [Element::Number(1), partition, name, Element::Bytes(instance), Element::Number(part), last];
            pack(&self.prefix, &place)
        };
        let operand = lanes.iter().flat_map(|lane| lane.to_le_bytes()).collect();
        let counters = Mutation { op: Op::Add, key: key(0, Element::Number(slot)), operand };
        let ddocs = events.ddocs.iter().map(|ddoc| Mutation {
            op: Op::SetVersionstampedValue,
            key: key(2, Element::Text(ddoc)),
            operand: vec![0; 14],
        });
        Ok(std::iter::once(counters).chain(ddocs).collect())
    }

    /// The mutation that wakes the notifier. Apply it after the commit, in another transaction.
    pub fn doorbell(&self, name: &str) -> Mutation {
        let key = pack(&self.prefix, &[Element::Number(2), Element::Number(self.partition(name))]);
        Mutation { op: Op::Add, key, operand: 1_u64.to_le_bytes().to_vec() }
    }
}

/// The key of the configuration of a bus.
pub fn config_key(prefix: &[u8]) -> Vec<u8> {
    pack(prefix, &[Element::Number(0)])
}

/// An element of a tuple.
enum Element<'a> {
    Number(u64),
    Text(&'a str),
    Bytes(&'a [u8]),
}

/// The key of a tuple.
fn pack(prefix: &[u8], elements: &[Element<'_>]) -> Vec<u8> {
    let mut key = prefix.to_vec();
    for element in elements {
        let (tag, data) = match element {
            Element::Number(number) => {
                let digits = 8 - number.leading_zeros() as usize / 8;
                key.push(0x14 + digits as u8);
                key.extend_from_slice(&number.to_be_bytes()[8 - digits..]);
                continue;
            }
            Element::Bytes(data) => (1, *data),
            Element::Text(text) => (2, text.as_bytes()),
        };
        key.push(tag);
        for &byte in data {
            key.push(byte);
            if byte == 0 {
                key.push(0xff);
            }
        }
        key.push(0);
    }
    key
}

const SECRET: [u64; 24] = [
    0xb8fe_6c39_23a4_4bbe,
    0x7c01_812c_f721_ad1c,
    0xded4_6de9_8390_97db,
    0x7240_a4a4_b7b3_671f,
    0xcb79_e64e_ccc0_e578,
    0x825a_d07d_ccff_7221,
    0xb808_4674_f743_248e,
    0xe035_90e6_813a_264c,
    0x3c28_52bb_91c3_00cb,
    0x88d0_658b_1b53_2ea3,
    0x7164_4897_a20d_f94e,
    0x3819_ef46_a9de_acd8,
    0xa8fa_763f_e39c_343f,
    0xf9dc_bbc7_c70b_4f1d,
    0x8a51_e04b_cdb4_5931,
    0xc89f_7ec9_d978_7364,
    0xeac5_ac83_34d3_ebc3,
    0xc581_a0ff_fa13_63eb,
    0x170d_dd51_b7f0_da49,
    0xd316_5526_29d4_689e,
    0x2b16_be58_7d47_a1fc,
    0x8ff8_b8d1_7ad0_31ce,
    0x45cb_3a8f_9516_0428,
    0xafd7_fbca_bb4b_407e,
];
const P64: [u64; 5] = [
    0x9e37_79b1_85eb_ca87,
    0xc2b2_ae3d_27d4_eb4f,
    0x1656_67b1_9e37_79f9,
    0x85eb_ca77_c2b2_ae63,
    0x27d4_eb2f_1656_67c5,
];

fn u32_at(data: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(data[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(data: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(data[at..at + 8].try_into().expect("8 bytes"))
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

fn avalanche(h: u64) -> u64 {
    let h = (h ^ h >> 37).wrapping_mul(0x1656_6791_9e37_79f9);
    h ^ h >> 32
}

fn avalanche64(h: u64) -> u64 {
    let h = (h ^ h >> 33).wrapping_mul(P64[1]);
    let h = (h ^ h >> 29).wrapping_mul(P64[2]);
    h ^ h >> 32
}

/// 64-bit XXH3 with seed 0, for at most 1,024 bytes.
fn xxh3(data: &[u8]) -> u64 {
    let secret: Vec<u8> = SECRET.iter().flat_map(|word| word.to_be_bytes()).collect();
    let (n, secret) = (data.len(), &secret[..]);
    let size = n as u64;
    let mix =
        |at, s| fold(u64_at(data, at) ^ u64_at(secret, s), u64_at(data, at + 8) ^ u64_at(secret, s + 8));
    let sum = |places: &mut dyn Iterator<Item = (usize, usize)>, from: u64| {
        places.fold(from, |h, (at, s)| h.wrapping_add(mix(at, s)))
    };
    match n {
        0 => avalanche64(u64_at(secret, 56) ^ u64_at(secret, 64)),
        1..=3 => {
            let [first, middle, last] = [data[0], data[n >> 1], data[n - 1]].map(u32::from);
            let combined = first << 16 | middle << 24 | last | (n as u32) << 8;
            avalanche64(u64::from(combined ^ u32_at(secret, 0) ^ u32_at(secret, 4)))
        }
        4..=8 => {
            let h = u64::from(u32_at(data, n - 4)) + (u64::from(u32_at(data, 0)) << 32);
            let h = h ^ u64_at(secret, 8) ^ u64_at(secret, 16);
            let h = (h ^ h.rotate_left(49) ^ h.rotate_left(24)).wrapping_mul(0x9fb2_1c65_1e98_df25);
            let h = (h ^ (h >> 35).wrapping_add(size)).wrapping_mul(0x9fb2_1c65_1e98_df25);
            h ^ h >> 28
        }
        9..=16 => {
            let low = u64_at(data, 0) ^ u64_at(secret, 24) ^ u64_at(secret, 32);
            let high = u64_at(data, n - 8) ^ u64_at(secret, 40) ^ u64_at(secret, 48);
            avalanche(size.wrapping_add(low.swap_bytes()).wrapping_add(high).wrapping_add(fold(low, high)))
        }
        17..=128 => {
            let mut places =
                (0..=(n - 1) / 32).flat_map(|i| [(16 * i, 32 * i), (n - 16 * (i + 1), 32 * i + 16)]);
            avalanche(sum(&mut places, size.wrapping_mul(P64[0])))
        }
        129..=240 => {
            let h = avalanche(sum(&mut (0..8).map(|i| (16 * i, 16 * i)), size.wrapping_mul(P64[0])));
            let rest = (8..n / 16).map(|i| (16 * i, 16 * (i - 8) + 3));
            avalanche(sum(&mut rest.chain([(n - 16, 119)]), h))
        }
        _ => {
            let mut acc = [0xc2b2_ae3d, P64[0], P64[1], P64[2], P64[3], 0x85eb_ca77, P64[4], 0x9e37_79b1];
            let stripes = (n - 1) / 64;
            for (at, s) in (0..stripes).map(|stripe| (64 * stripe, 8 * stripe)).chain([(n - 64, 121)]) {
                for i in 0..8 {
                    let value = u64_at(data, at + 8 * i);
                    let key = value ^ u64_at(secret, s + 8 * i);
                    acc[i ^ 1] = acc[i ^ 1].wrapping_add(value);
                    acc[i] = acc[i].wrapping_add((key & 0xffff_ffff) * (key >> 32));
                }
            }
            let halves = (0..4).map(|i| {
                fold(acc[2 * i] ^ u64_at(secret, 11 + 16 * i), acc[2 * i + 1] ^ u64_at(secret, 19 + 16 * i))
            });
            avalanche(halves.fold(size.wrapping_mul(P64[0]), u64::wrapping_add))
        }
    }
}

// Copy up to here. The rest answers a line of words, with byte strings as "x" and hexadecimal digits: "hash NAME", or "record PREFIX CONFIG
// NAME INSTANCE SLOT CREATED DELETED UPDATED DDOC_UPDATED DDOC…".

fn answer(words: &[&str]) -> Result<String, String> {
    let bytes = |at: usize| -> Vec<u8> {
        let pairs = words[at][1..].as_bytes().chunks(2);
        pairs
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("digits"), 16).expect("digits"))
            .collect()
    };
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    if words[0] == "hash" {
        return Ok(format!("{:016x}", xxh3(&bytes(1))));
    }
    let text = |at: usize| String::from_utf8(bytes(at)).expect("text");
    let lane = |at: usize| words[at].parse::<u64>().expect("a number");
    let ddocs: Vec<_> = (10..words.len()).map(text).collect();
    let events = Events {
        created: lane(6),
        deleted: lane(7),
        updated: lane(8),
        ddoc_updated: lane(9),
        ddocs: ddocs.iter().map(|ddoc| &**ddoc).collect(),
    };
    let (recorder, name) = (Recorder::new(&bytes(1), &bytes(2))?, text(3));
    let mut mutations = recorder.mutations(&name, &bytes(4), &events, lane(5))?;
    mutations.push(recorder.doorbell(&name));
    Ok(mutations.iter().fold(hex(&config_key(&bytes(1))), |said, Mutation { op, key, operand }| {
        let op = if *op == Op::Add { "add" } else { "set_versionstamped_value" };
        format!("{said} {op} {} {}", hex(key), hex(operand))
    }))
}

fn main() {
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        println!("{}", answer(&line.split_whitespace().collect::<Vec<_>>()).unwrap_or("refused".to_owned()));
    }
}
