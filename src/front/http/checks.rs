//! [`Checks`] verifies passwords. Each check costs 19 MB and keeps a core busy, so this module bounds the cost of guessers and
//! keeps them from slowing down others.
//!
//! # Invariants
//!
//! 1. A check holds its permit until it ends, even if the client hangs up meanwhile. So the number of checks is limited, and the
//!    memory for them is constant.
//! 2. Each name has one check at a time. An unknown name never takes a permit that others wait for. So guesses, of one name or of
//!    many, do not delay log-ins under other names.
//! 3. A pair of a name and an address may fail a few times; after that, it is refused without a check. A check counts as failed
//!    while it runs, so that a hundred parallel requests are not a hundred free guesses.
//! 4. Few requests wait for the checks of one name, and few for those of all unknown names. The next one is refused. So requests
//!    that wait hold bounded memory, even if their clients have hung up and the server cannot see that.
//! 5. Requests with equal headers share one check. So a client with the right password does not lock itself out by opening many
//!    connections.

use std::{
    collections::HashMap,
    hash::BuildHasher,
    net::IpAddr,
    num::NonZero,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use argon2::{Algorithm, Argon2, Block, Params, Version, password_hash::phc::PasswordHash};
use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared, WeakShared},
};
use parking_lot::Mutex;
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    lockout::{Failures, network},
    tally::Tally,
};
use crate::base::env::Env;

/// The most checks at once.
const AT_ONCE_MAX: usize = 2;

/// How many failures lock out a pair of a name and an address, as in CouchDB.
const FAILURES_MAX: u32 = 5;

/// How long a pair is locked out.
const LOCKED_FOR: Duration = Duration::from_mins(5);

/// How many pairs of known names are remembered, and how many of unknown names.
const PAIRS_MAX: usize = 10_000;

/// How many requests may wait for the checks of one name, and how many for those of all unknown names. It is the same number for
/// both, so that it does not tell which names are known. A name with so many waits some 10 s.
const WAITING_MAX: usize = 500;

/// How many lines the log gets about one address in [`LOCKED_FOR`].
const LINES_MAX: u32 = 10;

/// The most characters of a name that the log shows.
const SHOWN_MAX: usize = 64;

/// The result of a log-in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Verified,
    Wrong,
    /// The pair of name and address is locked out for this long.
    Locked(Duration),
    /// Too many others wait for their checks of this name.
    Crowded,
}

#[derive(Debug)]
struct Account {
    name: String,
    hash: PasswordHash,
    /// Lets one check of this account run at a time.
    turn: Arc<Semaphore>,
}

/// A check that several requests may await.
type Check = Shared<BoxFuture<'static, Outcome>>;

/// The checks in progress, by the digest of the credentials and the address of the client.
type InProgress = HashMap<([u8; 32], IpAddr), WeakShared<BoxFuture<'static, Outcome>>>;

#[derive(Debug)]
pub(super) struct Checks(Arc<Inner>);

/// The state that checks share.
#[derive(Debug)]
struct Inner {
    accounts: Vec<Account>,
    turns: Arc<Semaphore>,
    /// The memory of ended checks, for the next ones. If it went back to the allocator, the heap of each thread would hold it.
    memory: Mutex<Vec<Vec<Block>>>,
    in_progress: Mutex<InProgress>,
    /// The requests that wait, by the place of the name; `None` for all unknown names.
    waiting: Arc<Tally<Option<usize>>>,
    /// The failures by known name and address.
    known: Failures,
    /// The failures by unknown name and address.
    unknown: Failures,
    /// Hashes the unknown names.
    hasher: foldhash::fast::RandomState,
    /// The lines of the log, by address.
    lines: Failures,
    /// How long the last check took, including its wait, in microseconds.
    usual_us: AtomicU64,
}

/// A try that was counted. If it is dropped before its check begins, it is no longer counted.
struct Try {
    inner: Arc<Inner>,
    /// The place of a known name, or the hash of an unknown one.
    name: Result<usize, u64>,
    address: IpAddr,
    has_begun: bool,
}

impl Checks {
    /// Verifies the passwords of these names by their hashes.
    pub fn new(accounts: Vec<(String, PasswordHash)>) -> Self {
        let account = |(name, hash)| Account { name, hash, turn: Arc::new(Semaphore::new(1)) };
        Self(Arc::new(Inner {
            accounts: accounts.into_iter().map(account).collect(),
            turns: Arc::new(Semaphore::new(at_once())),
            memory: Mutex::default(),
            in_progress: Mutex::default(),
            waiting: Tally::new(),
            known: Failures::new(FAILURES_MAX, LOCKED_FOR, PAIRS_MAX),
            unknown: Failures::new(FAILURES_MAX, LOCKED_FOR, PAIRS_MAX),
            hasher: foldhash::fast::RandomState::default(),
            lines: Failures::new(LINES_MAX, LOCKED_FOR, PAIRS_MAX),
            usual_us: AtomicU64::new(20_000),
        }))
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.accounts.iter().map(|account| account.name.as_str())
    }

    /// Returns the hash of the password of `name`, if the name is known.
    pub fn hash_of(&self, name: &str) -> Option<String> {
        self.place_of(name).map(|place| self.0.accounts[place].hash.to_string())
    }

    /// Returns the place of the account of `name`, if the name is known.
    fn place_of(&self, name: &str) -> Option<usize> {
        self.0.accounts.iter().position(|account| account.name == name)
    }

    /// Returns whether `name` has this `password`. The request came from `address`; `digest` is the digest of name and password.
    ///
    /// This is cancel safe: a check that waits ends with the last request that awaits it; a check that has begun goes on.
    pub async fn check(
        &self,
        name: &str,
        password: &str,
        digest: [u8; 32],
        address: IpAddr,
        env: &Env,
    ) -> Outcome {
        let key = (digest, address);
        let Ok(_waiting) = self.0.waiting.enter(self.place_of(name), WAITING_MAX) else {
            return Outcome::Crowded;
        };
        let check = {
            let mut in_progress = self.0.in_progress.lock();
            match in_progress.get(&key).and_then(WeakShared::upgrade) {
                Some(check) => check,
                None => match self.begin(name, password, network(address), env) {
                    Err(locked) => return Outcome::Locked(locked),
                    Ok(check) => {
                        in_progress.extend(check.downgrade().map(|weak| (key, weak)));
                        check
                    }
                },
            }
        };
        let outcome = Awaited { inner: &self.0, key, check: Some(check) }.await;
        if outcome == Outcome::Wrong {
            self.0.log(address, name, env.now());
        }
        outcome
    }

    /// Counts and logs a wrong token from `address` like a wrong password of `name`.
    pub fn wrong_token(&self, name: &str, address: IpAddr, env: &Env) -> Outcome {
        let unknown = Err(self.0.hasher.hash_one(name));
        if let Err(locked) = self.0.count(unknown, network(address), env.now()) {
            return Outcome::Locked(locked);
        }
        self.0.log(address, name, env.now());
        Outcome::Wrong
    }

    /// Makes the check, which counts as a failure until it finds the password right. Fails with the remaining time if the pair is
    /// locked out.
    fn begin(&self, name: &str, password: &str, address: IpAddr, env: &Env) -> Result<Check, Duration> {
        let inner = &self.0;
        let name = self.place_of(name).ok_or_else(|| inner.hasher.hash_one(name));
        inner.count(name, address, env.now())?;
        let mut tried = Try { inner: Arc::clone(inner), name, address, has_begun: false };
        let (password, env) = (password.to_owned(), env.clone());
        let check = async move {
            let (began, inner) = (env.now(), Arc::clone(&tried.inner));
            let Some((hash, turns)) = inner.turn(name).await else {
                env.sleep(Duration::from_micros(inner.usual_us.load(Ordering::Relaxed))).await;
                tried.has_begun = true;
                return tried.settle(false);
            };
            let verify = move || {
                let _turns = turns;
                tried.has_begun = true;
                let is_right = tried.inner.verify(password.as_bytes(), &hash).unwrap_or(false);
                tried.settle(is_right)
            };
            let outcome = tokio::task::spawn_blocking(verify).await.unwrap_or(Outcome::Wrong);
            let took = env.now().saturating_sub(began).as_micros();
            inner.usual_us.store(u64::try_from(took).unwrap_or(u64::MAX), Ordering::Relaxed);
            outcome
        };
        Ok(check.boxed().shared())
    }
}

/// A check that a request awaits. Dropping the last one of a check takes the check off those in progress.
struct Awaited<'a> {
    inner: &'a Inner,
    key: ([u8; 32], IpAddr),
    /// `None` only while it is dropped.
    check: Option<Check>,
}

impl Future for Awaited<'_> {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        self.check.as_mut().expect("it is not dropped").poll_unpin(context)
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        drop(self.check.take());
        let mut in_progress = self.inner.in_progress.lock();
        if in_progress.get(&self.key).is_some_and(|check| check.upgrade().is_none()) {
            in_progress.remove(&self.key);
        }
    }
}

/// Returns how many checks run at once. They leave half of the processors, so that a flood of guesses does not hold up answers.
fn at_once() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    (processors / 2).clamp(1, AT_ONCE_MAX)
}

impl Inner {
    fn count(&self, name: Result<usize, u64>, address: IpAddr, now: Duration) -> Result<u32, Duration> {
        match name {
            Ok(place) => self.known.count((place as u64, address), now),
            Err(hash) => self.unknown.count((hash, address), now),
        }
    }

    /// Waits for the permits of a check, and returns them with the hash. Unknown names have to look like known ones: such a name
    /// gets a check if nobody else needs the permit. Otherwise this returns `None`, and the caller waits as long as a check usually
    /// takes.
    async fn turn(
        &self,
        name: Result<usize, u64>,
    ) -> Option<(PasswordHash, [Option<OwnedSemaphorePermit>; 2])> {
        let closed = "the semaphore is never closed";
        if let Ok(place) = name {
            let account = &self.accounts[place];
            let own = Arc::clone(&account.turn).acquire_owned().await.expect(closed);
            let one = Arc::clone(&self.turns).acquire_owned().await.expect(closed);
            return Some((account.hash.clone(), [Some(own), Some(one)]));
        }
        let account = self.accounts.first()?;
        let one = Arc::clone(&self.turns).try_acquire_owned().ok()?;
        Some((account.hash.clone(), [None, Some(one)]))
    }

    /// Returns whether `password` has this hash; `None` if the hash cannot be read. This takes long.
    fn verify(&self, password: &[u8], hash: &PasswordHash) -> Option<bool> {
        let params = Params::try_from(hash).ok()?;
        let algorithm = Algorithm::new(hash.algorithm.as_str()).ok()?;
        let version = hash.version.map_or(Some(Version::default()), |version| version.try_into().ok())?;
        let (salt, expected) = (hash.salt.as_ref()?, hash.hash.as_ref()?);
        let blocks = params.block_count();
        let pool = || self.memory.lock();
        let mut memory = pool().pop().unwrap_or_default();
        memory.resize(blocks, Block::default());
        let mut found = vec![0; expected.as_bytes().len()];
        let argon2 = Argon2::new(algorithm, version, params);
        let filled = argon2.hash_password_into_with_memory(password, salt.as_ref(), &mut found, &mut memory);
        pool().push(memory);
        filled.ok()?;
        Some(found.ct_eq(expected.as_bytes()).into())
    }

    /// Logs a failure in one line that fail2ban can read. It logs only the first failures of each address.
    fn log(&self, peer: IpAddr, name: &str, now: Duration) {
        if self.lines.count((0, network(peer)), now).is_ok() {
            let name: String = name.chars().take(SHOWN_MAX).collect();
            tracing::warn!(peer = %peer.to_canonical(), ?name, "a log-in has failed");
        }
    }
}

impl Try {
    /// Returns the result of the try. A right password clears the failures of the pair.
    fn settle(&self, is_right: bool) -> Outcome {
        match self.name {
            Ok(place) if is_right => {
                self.inner.known.clear((place as u64, self.address));
                Outcome::Verified
            }
            _ => Outcome::Wrong,
        }
    }
}

impl Drop for Try {
    fn drop(&mut self) {
        if self.has_begun {
            return;
        }
        match self.name {
            Ok(place) => self.inner.known.take_back((place as u64, self.address)),
            Err(hash) => self.inner.unknown.take_back((hash, self.address)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use argon2::PasswordHasher;
    use tokio::task::JoinSet;

    use super::*;

    /// Makes accounts with the password "secret" and a hash that is fast to check.
    fn checks(names: &[&str]) -> Arc<Checks> {
        let argon2 =
            Argon2::new(Algorithm::Argon2id, Version::default(), Params::new(8, 1, 1, None).unwrap());
        let hash: PasswordHash = argon2.hash_password_with_salt(b"secret", &[7; 16]).unwrap();
        Arc::new(Checks::new(names.iter().map(|name| ((*name).to_owned(), hash.clone())).collect()))
    }

    /// Regression: with 200 guessers a right log-in waited for all of them: 5.9 s.
    #[tokio::test]
    async fn who_logs_in_waits_for_few_checks_of_others() {
        let (checks, env) = (checks(&["anna", "bob"]), Env::system());
        let ended = Arc::new(AtomicU64::new(0));
        let mut guesses = JoinSet::new();
        for guess in 0..200_u8 {
            let (checks, env, ended) = (Arc::clone(&checks), env.clone(), Arc::clone(&ended));
            guesses.spawn(async move {
                let address = Ipv4Addr::new(10, 0, 0, guess).into();
                let outcome = checks.check("anna", "wrong", [guess; 32], address, &env).await;
                ended.fetch_add(1, Ordering::Relaxed);
                outcome
            });
        }
        // All guesses have begun, and wait for each other.
        while ended.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        let before = ended.load(Ordering::Relaxed);
        let outcome = checks.check("bob", "secret", [255; 32], Ipv4Addr::LOCALHOST.into(), &env).await;
        let others = ended.load(Ordering::Relaxed) - before;
        assert_eq!(outcome, Outcome::Verified);
        assert!(others < 20, "it has waited for {others}");
        while let Some(outcome) = guesses.join_next().await {
            assert_eq!(outcome.unwrap(), Outcome::Wrong);
        }
    }

    /// Regression: any number of requests waited, and each held its connection, so 10,000 that had hung up held 254 MB.
    #[tokio::test]
    async fn few_wait_for_the_checks_of_one_name_and_nobody_else_is_refused() {
        let (checks, env) = (checks(&["anna", "bob"]), Env::system());
        checks.0.usual_us.store(u64::from(u32::MAX), Ordering::Relaxed);
        for name in ["anna", "carl"] {
            let check = |guess: usize| {
                let mut digest = [0; 32];
                digest[..8].copy_from_slice(&guess.to_be_bytes());
                let address = Ipv4Addr::from(guess as u32).into();
                Box::pin(checks.check(name, "wrong", digest, address, &env))
            };
            let turns = Arc::clone(&checks.0.turns).acquire_many_owned(at_once() as u32).await.unwrap();
            let mut waiting: Vec<_> = (0..WAITING_MAX).map(check).collect();
            for guess in &mut waiting {
                assert_eq!(guess.now_or_never(), None);
            }
            assert_eq!(check(WAITING_MAX).now_or_never(), Some(Outcome::Crowded), "{name}");
            let mut other =
                Box::pin(checks.check("bob", "secret", [255; 32], Ipv4Addr::LOCALHOST.into(), &env));
            assert_eq!((&mut other).now_or_never(), None, "it waits for its turn");
            // Who has hung up makes room.
            drop(waiting);
            assert_eq!(check(WAITING_MAX).now_or_never(), None, "{name}");
            drop(turns);
            assert_eq!(other.await, Outcome::Verified);
            assert!(checks.0.in_progress.lock().is_empty());
        }
    }

    #[tokio::test]
    async fn wrong_tokens_are_counted_by_where_they_come_from() {
        let (checks, env) = (checks(&["anna"]), Env::system());
        let [here, there] = [1, 2].map(|last| IpAddr::from(Ipv4Addr::new(10, 0, 0, last)));
        for _ in 0..FAILURES_MAX {
            assert_eq!(checks.wrong_token("bearer", here, &env), Outcome::Wrong);
        }
        assert!(matches!(checks.wrong_token("bearer", here, &env), Outcome::Locked(_)));
        assert_eq!(checks.wrong_token("bearer", there, &env), Outcome::Wrong);
    }
}
