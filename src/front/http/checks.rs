//! [`Checks`]: verifies passwords, which costs 19 MB and the time of a core each, so that guessers cost a bounded amount and
//! slow nobody else.
//!
//! # Invariants
//!
//! 1. A permit lives as long as its check, even if the client hangs up meanwhile: so the checks that take memory are limited,
//!    and their memory is constant.
//! 2. Each name has one check at a time, and text that is no name takes no permit for which others wait: guesses of one name, or of
//!    any, do not delay log-ins under other names.
//! 3. A pair of a name and an address has a few failures, and is then refused without a check. A check counts as failed while it
//!    runs, so that a hundred at once are not a hundred guesses.
//! 4. Requests with equal headers share one check: a right client that begins with many connections does not lock itself out.

use std::{
    collections::HashMap,
    hash::BuildHasher,
    net::IpAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use argon2::{Algorithm, Argon2, Block, Params, Version, password_hash::phc::PasswordHash};
use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared, WeakShared},
};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::lockout::{Failures, network};
use crate::base::env::Env;

/// How many passwords are verified at once.
const AT_ONCE_MAX: usize = 2;

/// After how many failures a pair of a name and an address is locked out, as in CouchDB.
const FAILURES_MAX: u32 = 5;

/// For how long it is.
const LOCKED_FOR: Duration = Duration::from_mins(5);

/// How many pairs are remembered; as many again of names that there are not.
const PAIRS_MAX: usize = 10_000;

/// How many lines the log gets of one address in [`LOCKED_FOR`].
const LINES_MAX: u32 = 10;

/// The most characters of a name that are logged.
const SHOWN_MAX: usize = 64;

/// What has become of a log-in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Name and password are right.
    Right,
    /// They are not.
    Wrong,
    /// The pair of name and address is locked out for so long.
    Locked(Duration),
}

/// A name and its hash.
#[derive(Debug)]
struct Account {
    name: String,
    hash: PasswordHash,
    /// Lets one check of it at a time through.
    turn: Arc<Semaphore>,
}

/// A check that several requests may wait for.
type Check = Shared<BoxFuture<'static, Outcome>>;

/// Checks in progress, by the digest of what is checked and where it comes from.
type InProgress = HashMap<([u8; 32], IpAddr), WeakShared<BoxFuture<'static, Outcome>>>;

/// Verifies passwords.
#[derive(Debug)]
pub(super) struct Checks(Arc<Inner>);

/// What checks share.
#[derive(Debug)]
struct Inner {
    /// Names and hashes of passwords.
    accounts: Vec<Account>,
    /// Limits how many passwords are verified at once.
    turns: Arc<Semaphore>,
    /// The memory of checks that have ended, for those to come: given back to the allocator, each thread's heap would keep it.
    memory: Mutex<Vec<Vec<Block>>>,
    /// The checks in progress.
    in_progress: Mutex<InProgress>,
    /// Failures by name and address.
    known: Failures,
    /// The same, of names that there are not.
    unknown: Failures,
    /// Hashes them.
    hasher: foldhash::fast::RandomState,
    /// Lines of the log, by address.
    lines: Failures,
    /// How long the last check has taken, its wait included, in microseconds.
    usual_us: AtomicU64,
}

/// A try that was counted. Dropped before its check has begun, it was none.
struct Try {
    /// What it is a check of.
    inner: Arc<Inner>,
    /// The place of the name, or the hash of one that there is not.
    name: Result<usize, u64>,
    /// Where it comes from.
    address: IpAddr,
    /// Whether it counts.
    has_begun: bool,
}

impl Checks {
    /// Verifies the passwords of these names, by their hashes.
    pub fn new(accounts: Vec<(String, PasswordHash)>) -> Self {
        let account = |(name, hash)| Account { name, hash, turn: Arc::new(Semaphore::new(1)) };
        Self(Arc::new(Inner {
            accounts: accounts.into_iter().map(account).collect(),
            turns: Arc::new(Semaphore::new(AT_ONCE_MAX)),
            memory: Mutex::default(),
            in_progress: Mutex::default(),
            known: Failures::new(FAILURES_MAX, LOCKED_FOR, PAIRS_MAX),
            unknown: Failures::new(FAILURES_MAX, LOCKED_FOR, PAIRS_MAX),
            hasher: foldhash::fast::RandomState::default(),
            lines: Failures::new(LINES_MAX, LOCKED_FOR, PAIRS_MAX),
            usual_us: AtomicU64::new(20_000),
        }))
    }

    /// The names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.accounts.iter().map(|account| account.name.as_str())
    }

    /// The hash of the password of `name`, if there is such a name.
    pub fn hash_of(&self, name: &str) -> Option<String> {
        let account = self.0.accounts.iter().find(|account| account.name == name);
        account.map(|account| account.hash.to_string())
    }

    /// Whether `name` has this `password`, as asked from `address`; `digest` is that of both.
    ///
    /// It is cancel safe: a check that waits ends with the last request that waits for it; one that has begun goes on.
    pub async fn check(
        &self,
        name: &str,
        password: &str,
        digest: [u8; 32],
        address: IpAddr,
        env: &Env,
    ) -> Outcome {
        let key = (digest, address);
        let check = {
            let mut in_progress = self.0.in_progress.lock().unwrap_or_else(PoisonError::into_inner);
            match in_progress.get(&key).and_then(WeakShared::upgrade) {
                Some(check) => check,
                None => match self.begin(name, password, network(address), env) {
                    Err(locked) => return Outcome::Locked(locked),
                    Ok(check) => {
                        // Those whose requests have all hung up are still there.
                        if in_progress.len() == in_progress.capacity() {
                            in_progress.retain(|_, check| check.upgrade().is_some());
                        }
                        in_progress.extend(check.downgrade().map(|weak| (key, weak)));
                        check
                    }
                },
            }
        };
        let outcome = check.await;
        self.0.in_progress.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        if outcome == Outcome::Wrong {
            self.0.log(address, name, env.now());
        }
        outcome
    }

    /// What becomes of who has asked from `address` with a token that there is not, as of `name`: it is counted and logged as a wrong
    /// password is.
    pub fn wrong_token(&self, name: &str, address: IpAddr, env: &Env) -> Outcome {
        let unknown = Err(self.0.hasher.hash_one(name));
        if let Err(locked) = self.0.count(unknown, network(address), env.now()) {
            return Outcome::Locked(locked);
        }
        self.0.log(address, name, env.now());
        Outcome::Wrong
    }

    /// The check, counted as a failure until it is right. Fails with how long the pair is locked out.
    fn begin(&self, name: &str, password: &str, address: IpAddr, env: &Env) -> Result<Check, Duration> {
        let inner = &self.0;
        let place = inner.accounts.iter().position(|account| account.name == name);
        let name = place.ok_or_else(|| inner.hasher.hash_one(name));
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

impl Inner {
    /// Counts a try.
    fn count(&self, name: Result<usize, u64>, address: IpAddr, now: Duration) -> Result<u32, Duration> {
        match name {
            Ok(place) => self.known.count((place as u64, address), now),
            Err(hash) => self.unknown.count((hash, address), now),
        }
    }

    /// What a check of the name needs: a hash, and the permits that it holds. A name that there is not looks like one that there
    /// is: it gets a check if nobody else needs it (`None` if somebody does), and waits as long as one took else.
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

    /// Whether `password` has this hash; `None` if it is no hash. It takes its time.
    fn verify(&self, password: &[u8], hash: &PasswordHash) -> Option<bool> {
        let params = Params::try_from(hash).ok()?;
        let algorithm = Algorithm::new(hash.algorithm.as_str()).ok()?;
        let version = hash.version.map_or(Some(Version::default()), |version| version.try_into().ok())?;
        let (salt, expected) = (hash.salt.as_ref()?, hash.hash.as_ref()?);
        let blocks = params.block_count();
        let pool = || self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let mut memory = pool().pop().unwrap_or_default();
        memory.resize(blocks, Block::default());
        let mut found = vec![0; expected.as_bytes().len()];
        let argon2 = Argon2::new(algorithm, version, params);
        let filled = argon2.hash_password_into_with_memory(password, salt.as_ref(), &mut found, &mut memory);
        pool().push(memory);
        filled.ok()?;
        Some(found.ct_eq(expected.as_bytes()).into())
    }

    /// Logs a failure in one line that fail2ban can read, the first ones of each address.
    fn log(&self, peer: IpAddr, name: &str, now: Duration) {
        if self.lines.count((0, network(peer)), now).is_ok() {
            let name: String = name.chars().take(SHOWN_MAX).collect();
            tracing::warn!(peer = %peer.to_canonical(), ?name, "a log-in has failed");
        }
    }
}

impl Try {
    /// What has become of it.
    fn settle(&self, is_right: bool) -> Outcome {
        match self.name {
            Ok(place) if is_right => {
                self.inner.known.clear((place as u64, self.address));
                Outcome::Right
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

    /// Names with the password "secret", and a hash that takes no time to check.
    fn checks(names: &[&str]) -> Arc<Checks> {
        let argon2 =
            Argon2::new(Algorithm::Argon2id, Version::default(), Params::new(8, 1, 1, None).unwrap());
        let hash: PasswordHash = argon2.hash_password_with_salt(b"secret", &[7; 16]).unwrap();
        Arc::new(Checks::new(names.iter().map(|name| ((*name).to_owned(), hash.clone())).collect()))
    }

    /// With 200 guessers a right log-in once waited for all of them: 5.9 s.
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
        assert_eq!(outcome, Outcome::Right);
        assert!(others < 20, "it has waited for {others}");
        while let Some(outcome) = guesses.join_next().await {
            assert_eq!(outcome.unwrap(), Outcome::Wrong);
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
