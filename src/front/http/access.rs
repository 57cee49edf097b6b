//! [`Access`] says who may send requests. [`Credentials`] recognizes callers by passwords, tokens and cookies.
//!
//! The configuration holds a password as an Argon2 hash with its own salt. Verifying such a hash takes long. So the server
//! remembers the digest of each header that it found right, and requests with unknown headers wait for their turn (`checks`). A
//! token has to be long and random; the configuration holds its SHA-256. All comparisons take constant time.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use argon2::{Argon2, PasswordHasher, password_hash::phc::PasswordHash};
use axum::http::{HeaderMap, StatusCode, header};
use base64ct::{Base64, Encoding};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::{
    Failure, Peer,
    caller::{Caller, Grant},
    checks::{Checks, Outcome},
    cookie::{Sessions, cookie},
};
use crate::base::{
    env::Env,
    error::{Error, Result},
};

/// How many verified headers the server remembers.
const VERIFIED_MAX: usize = 256;

const TOKEN_LEN_MIN: usize = 16;

/// The most bytes of a name and a password together. A log-in holds them while it waits for its check.
const LOG_IN_LEN_MAX: usize = 4_096;

/// The prefix of the line with the key that signs sessions.
const SESSIONS: &str = "sessions:key:";

/// The prefix of a token's line. After it come the token's name and a colon, if it has a name, and the digest.
const BEARER: &str = "bearer:";

/// The prefix of a token's digest.
const DIGEST: &str = "sha256:";

/// The name of a token without a name.
const NAMELESS: &str = "bearer";

type Sha = [u8; 32];

/// Who may send requests.
#[derive(Debug, Clone, Default)]
pub enum Access {
    /// Everyone who reaches the server is its admin. [`Hosts::Local`](super::Hosts::Local), the default, keeps out web pages that
    /// would reach the server through a browser.
    #[default]
    Open,
    /// Only callers with credentials may send requests. Each may do what its [`Grant`] allows.
    Credentials(Credentials),
}

/// Names with passwords, and bearer tokens, as a configuration holds them. Clones share the headers that were verified.
///
/// ```
/// use notibus::http::Credentials;
///
/// let anna = Credentials::password("anna", "correct horse")?;
/// let indexer = Credentials::token(Some("indexer"), "0123456789abcdef0123456789abcdef")?;
/// let lines = format!("# who may ask\n{anna}\n{indexer} roles=_db_updates reads=shop/*\n");
/// let credentials: Credentials = lines.parse()?;
/// assert!(!format!("{credentials:?}").contains("argon2"));
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Clone)]
pub struct Credentials(Arc<Inner>);

/// The state that clones share.
struct Inner {
    checks: Checks,
    /// The grant of each name with a password.
    grants: HashMap<String, Arc<Grant>>,
    /// The SHA-256 of each token, and the caller that it belongs to.
    tokens: Vec<(Sha, Caller)>,
    /// The digests of the headers that were verified lately, and their callers; newest last.
    verified: Mutex<VecDeque<(Sha, Caller)>>,
    sessions: Sessions,
}

/// The caller whose credentials were found right.
#[derive(Debug)]
pub(super) struct Caught {
    pub caller: Caller,
    /// `None` if the caller was not recognized by the cookie of a session. Otherwise the value of a new cookie, if one is due.
    #[expect(clippy::option_option, reason = "no session, one that goes on, and one that is renewed")]
    pub session: Option<Option<String>>,
}

impl Credentials {
    /// Returns the line of a configuration for `name` with `password`. It makes `name` an admin, unless you append a space and a
    /// [`Grant`]. The salt comes from the operating system.
    ///
    /// Fails with [`Error::Invalid`] if the name is empty, is `bearer` or has a colon or a line break, if the password is empty, or if
    /// both together have more than 4,096 bytes.
    pub fn password(name: &str, password: &str) -> Result<String> {
        check_name(name)?;
        if password.is_empty() {
            return Err(Error::invalid("password", "it is empty"));
        }
        if name.len() + password.len() > LOG_IN_LEN_MAX {
            let reason = format!("it has more than {LOG_IN_LEN_MAX} bytes together with the name");
            return Err(Error::invalid("password", reason));
        }
        let hash: PasswordHash = Argon2::default()
            .hash_password(password.as_bytes())
            .map_err(|error| Error::invalid("password", error.to_string()))?;
        Ok(format!("{name}:{hash}"))
    }

    /// Returns the line of a configuration for `token`. It makes the holder an admin, unless you append a space and a [`Grant`].
    /// The `name` serves logs, limits and layers.
    ///
    /// Fails with [`Error::Invalid`] if the token has less than 16 characters, if a character is not visible ASCII, or if
    /// [`Credentials::password`] would not accept the name.
    pub fn token(name: Option<&str>, token: &str) -> Result<String> {
        name.map_or(Ok(()), check_name)?;
        if token.len() < TOKEN_LEN_MIN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let reason = format!("it needs at least {TOKEN_LEN_MIN} characters, all of them visible ASCII");
            return Err(Error::invalid("token", reason));
        }
        let name = name.map_or_else(String::new, |name| format!("{name}:"));
        let start = format!("{BEARER}{name}{DIGEST}");
        Ok(sha(token.as_bytes()).iter().fold(start, |line, byte| format!("{line}{byte:02x}")))
    }

    /// Returns the caller that the credentials in `headers` name; the request came from `peer`. Fails with 401 if there are no
    /// credentials or wrong ones, and with 403 if the name is locked out for this address.
    pub(super) async fn check(
        &self,
        headers: &HeaderMap,
        peer: Option<Peer>,
        env: &Env,
    ) -> Result<Caught, Failure> {
        let mut values = headers.get_all(header::AUTHORIZATION).iter();
        let Some(value) = values.next() else {
            let caught = cookie(headers).and_then(|value| self.session(value, env));
            return caught.ok_or_else(|| Failure::unauthorized("You are not a server admin."));
        };
        if values.next().is_some() {
            // A proxy in front may have checked the other one.
            return Err(Failure::bad_request("There are several headers Authorization."));
        }
        let digest = sha(value.as_bytes());
        if let Some(caller) = self.known(&digest) {
            return Ok(Caught { caller, session: None });
        }
        let wrong = || Failure::unauthorized("Name or password is incorrect.");
        let (scheme, secret) = value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or_else(wrong)?;
        let caller = if scheme.eq_ignore_ascii_case("bearer") {
            // Tokens are long and random, so nobody finds one by guessing. A caller with a right token is never locked out.
            match self.find_token(secret.trim()) {
                Some(caller) => caller,
                None => return Err(self.0.checks.wrong_token(NAMELESS, address(peer), env).into()),
            }
        } else if scheme.eq_ignore_ascii_case("basic") {
            let decoded =
                Base64::decode_vec(secret.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
            let decoded = decoded.ok_or_else(wrong)?;
            let (name, password) = decoded.split_once(':').ok_or_else(wrong)?;
            self.log_in(name, password, digest, peer, env).await?;
            self.caller(name)
        } else {
            return Err(wrong());
        };
        let mut verified = self.0.verified.lock();
        if verified.len() >= VERIFIED_MAX {
            verified.pop_front();
        }
        verified.push_back((digest, caller.clone()));
        Ok(Caught { caller, session: None })
    }

    fn caller(&self, name: &str) -> Caller {
        Caller::new(name, self.0.grants.get(name).map_or_else(Arc::default, Arc::clone))
    }

    /// Returns the caller of the session that the value of a cookie describes.
    fn session(&self, value: &str, env: &Env) -> Option<Caught> {
        let Inner { sessions, checks, .. } = &*self.0;
        let session = sessions.verify(value, env.wall_ms(), |name| checks.hash_of(name))?;
        let renewed = session.is_due.then(|| self.sign(&session.name, env)).flatten();
        Some(Caught { caller: self.caller(&session.name), session: Some(renewed) })
    }

    /// Returns the value of a cookie for `name`.
    fn sign(&self, name: &str, env: &Env) -> Option<String> {
        Some(self.0.sessions.sign(name, &self.0.checks.hash_of(name)?, env.wall_ms()))
    }

    /// Logs in. Returns the caller and the value of its cookie. Fails with 401 unless `name` has this `password`, and with 403 if
    /// the name is locked out.
    pub(super) async fn begin_session(
        &self,
        name: &str,
        password: &str,
        peer: Option<Peer>,
        env: &Env,
    ) -> Result<(Caller, String), Failure> {
        let digest = sha(format!("{}:{name}{password}", name.len()).as_bytes());
        self.log_in(name, password, digest, peer, env).await?;
        let cookie = self.sign(name, env);
        let cookie = cookie.ok_or_else(|| Failure::unauthorized("Name or password is incorrect."))?;
        Ok((self.caller(name), cookie))
    }

    /// Fails with 401 unless `name` has this `password`. Fails with 403, as CouchDB does, if the name is locked out for this
    /// address, with 503 if too many others wait, and with 400 if name and password are too long.
    async fn log_in(
        &self,
        name: &str,
        password: &str,
        digest: Sha,
        peer: Option<Peer>,
        env: &Env,
    ) -> Result<(), Failure> {
        if name.len() + password.len() > LOG_IN_LEN_MAX {
            let reason = format!("A name and a password have at most {LOG_IN_LEN_MAX} bytes together.");
            return Err(Failure::bad_request(reason));
        }
        match self.0.checks.check(name, password, digest, address(peer), env).await {
            Outcome::Verified => Ok(()),
            outcome => Err(outcome.into()),
        }
    }

    /// Returns the caller whose header has this digest, if the header was verified lately.
    fn known(&self, digest: &Sha) -> Option<Caller> {
        let verified = self.0.verified.lock();
        let known = verified.iter().find(|(known, _)| bool::from(known.ct_eq(digest)));
        known.map(|(_, caller)| caller.clone())
    }

    fn find_token(&self, token: &str) -> Option<Caller> {
        let digest = sha(token.as_bytes());
        // It compares all tokens, so that the time does not reveal which one matched.
        let tokens = self.0.tokens.iter();
        let found = tokens.fold(
            None,
            |found, (known, caller)| {
                if bool::from(known.ct_eq(&digest)) { Some(caller) } else { found }
            },
        );
        found.cloned()
    }
}

impl FromStr for Credentials {
    type Err = Error;

    /// Reads lines. [`Credentials::password`] and [`Credentials::token`] make them; each may end with a [`Grant`], and grants an
    /// admin's rights without one. Empty lines are allowed, and comments after `#`. A line `sessions:key:` with 64 hexadecimal
    /// digits holds the key that signs the cookies of sessions. Several nodes with the same key accept each other's cookies.
    /// Without such a line each process makes its own key.
    fn from_str(text: &str) -> Result<Self> {
        let (mut passwords, mut tokens, mut key) = (Vec::new(), Vec::new(), None);
        let mut grants = HashMap::new();
        for (place, line) in text.lines().map(str::trim).enumerate() {
            let bad = |reason: &str| Error::invalid("credentials", format!("line {}: {reason}", place + 1));
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (line, grant) = read_grant(line).map_err(|error| bad(&error.to_string()))?;
            if let Some(named) = line.strip_prefix(BEARER) {
                let (name, digest) = match named.split_once(':') {
                    Some((name, digest)) if named.strip_prefix(DIGEST).is_none() => {
                        (name, digest.strip_prefix(DIGEST))
                    }
                    _ => (NAMELESS, named.strip_prefix(DIGEST)),
                };
                let digest = digest.and_then(parse_sha);
                let digest = digest.ok_or_else(|| bad("sha256: and 64 hexadecimal digits have to follow"))?;
                tokens.push((digest, Caller::new(name, grant)));
                continue;
            }
            if let Some(digits) = line.strip_prefix(SESSIONS) {
                key = Some(parse_sha(digits).ok_or_else(|| bad("64 hexadecimal digits have to follow"))?);
                continue;
            }
            let (name, hash) = line.split_once(':').ok_or_else(|| bad("there is no colon"))?;
            // Nobody can say which of two passwords counts, and a password that was meant to be replaced would still work.
            if passwords.iter().any(|(known, _)| known == name) {
                return Err(bad("the name has a password already"));
            }
            let hash = PasswordHash::new(hash)
                .ok()
                .filter(|hash| hash.algorithm.as_str().starts_with("argon2") && hash.hash.is_some())
                .ok_or_else(|| bad("there is no Argon2 hash after the colon, as $argon2id$…"))?;
            if name.is_empty() {
                return Err(bad("the name is empty"));
            }
            grants.insert(name.to_owned(), Arc::new(grant));
            passwords.push((name.to_owned(), hash));
        }
        if passwords.is_empty() && tokens.is_empty() {
            return Err(Error::invalid("credentials", "there are none"));
        }
        let key = key.map_or_else(random, Ok)?;
        let (checks, sessions) = (Checks::new(passwords), Sessions::new(&key));
        Ok(Self(Arc::new(Inner { checks, grants, tokens, verified: Mutex::default(), sessions })))
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.checks.names().collect();
        f.debug_struct("Credentials").field("names", &names).field("tokens", &self.0.tokens.len()).finish()
    }
}

/// Fails if the name is not allowed.
fn check_name(name: &str) -> Result<()> {
    if name.is_empty()
        || matches!(name, "bearer" | "sessions" | "sha256")
        || name.starts_with('#')
        || name.contains([':', '\n', '\r'])
    {
        let reason =
            "it is empty, \"bearer\", \"sessions\", \"sha256\", a comment, or has a colon or a line break";
        return Err(Error::invalid("name", reason));
    }
    Ok(())
}

/// Splits a line into its credentials and its grant. A line without a grant has that of an admin.
fn read_grant(line: &str) -> Result<(&str, Grant)> {
    // Names may contain spaces, but no colons; hashes and digests contain no spaces.
    let start = line.find(if line.starts_with(BEARER) { DIGEST } else { ":" }).unwrap_or(0);
    let secret = &line[start..];
    match secret.split_once(char::is_whitespace) {
        Some((bare, grant)) => Ok((&line[..line.len() - secret.len() + bare.len()], grant.parse()?)),
        None => Ok((line, Grant::admin())),
    }
}

/// Returns the address that a request came from. All requests share one address if the listener does not set [`Peer`].
fn address(peer: Option<Peer>) -> IpAddr {
    peer.map_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED), |peer| peer.0)
}

impl From<Outcome> for Failure {
    /// Makes the answer to a caller that was not admitted.
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Verified | Outcome::Wrong => Self::unauthorized("Name or password is incorrect."),
            Outcome::Locked(rest) => {
                let reason = "Account is temporarily locked due to multiple authentication failures";
                Self::new(StatusCode::FORBIDDEN, "forbidden", reason).retry_after(rest)
            }
            Outcome::Crowded => {
                let reason = "Too many others wait for a log-in under this name. Try again.";
                let failure = Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", reason);
                failure.retry_after(Duration::from_secs(1))
            }
        }
    }
}

/// Returns 32 bytes from the operating system. Fails if it has none.
fn random() -> Result<Sha> {
    let mut bytes = Sha::default();
    getrandom::fill(&mut bytes).map_err(|error| Error::invalid("credentials", error.to_string()))?;
    Ok(bytes)
}

fn sha(bytes: &[u8]) -> Sha {
    Sha256::digest(bytes).into()
}

/// Parses a SHA-256 in hexadecimal digits.
fn parse_sha(digits: &str) -> Option<Sha> {
    let is_hex = digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut sha = Sha::default();
    for (byte, place) in sha.iter_mut().zip((0..64).step_by(2)).filter(|_| is_hex) {
        *byte = u8::from_str_radix(&digits[place..place + 2], 16).ok()?;
    }
    is_hex.then_some(sha)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    fn basic(text: &str) -> HeaderMap {
        headers(&format!("Basic {}", Base64::encode_string(text.as_bytes())))
    }

    async fn check(credentials: &Credentials, headers: &HeaderMap) -> Result<Arc<str>, Failure> {
        credentials.check(headers, None, &Env::system()).await.map(|caught| caught.caller.shared_name())
    }

    #[tokio::test]
    async fn only_the_right_ones_are_let_in() {
        let token = "a-token-of-some-length";
        let lines = [Credentials::password("anna", "s:e").unwrap(), Credentials::token(None, token).unwrap()];
        let credentials: Credentials = lines.join("\n").parse().unwrap();
        for _ in 0..2 {
            assert_eq!(&*check(&credentials, &basic("anna:s:e")).await.unwrap(), "anna");
            assert_eq!(&*check(&credentials, &headers(&format!("bearer {token}"))).await.unwrap(), "bearer");
        }
        for wrong in [
            HeaderMap::new(),
            basic("anna:s"),
            basic("bob:s:e"),
            basic("anna"),
            headers("Basic ///"),
            headers("Basic"),
            headers("Bearer a-token-of-some-lengtH"),
            headers(&format!("Digest {token}")),
        ] {
            let failure = check(&credentials, &wrong).await.unwrap_err();
            assert_eq!(failure.status(), StatusCode::UNAUTHORIZED, "{wrong:?}");
        }
    }

    #[test]
    fn bad_lines_are_refused() {
        for bad in [
            "",
            "# none",
            "anna",
            "anna:secret",
            ":$argon2id$v=19$m=8,t=1,p=1$AAAAAAAAAAA",
            "bearer:sha256:12",
            "bearer:a:sha256:12",
            "bearer:a",
            "anna:$argon2id$v=19$m=8,t=1,p=1$AAAAAAAAAAA roles=_amdin",
        ] {
            assert!(bad.parse::<Credentials>().is_err(), "{bad}");
        }
        let [old, new] = ["old", "new"].map(|password| Credentials::password("anna", password).unwrap());
        assert!(format!("{old}\n{new}").parse::<Credentials>().is_err(), "the new one was once not known");
        assert!(Credentials::password("a:b", "x").is_err() && Credentials::password("a", "").is_err());
        assert!(Credentials::token(None, "short").is_err());
        assert!(Credentials::token(Some("a:b"), "a-token-of-some-length").is_err());
    }

    #[tokio::test]
    async fn a_line_says_who_it_is_and_what_they_may() {
        let tokens = ["a-token-of-some-length", "another-token-of-some-length"];
        let lines = [
            format!("{}  reads=shop/*,a:b", Credentials::password("an na", "secret").unwrap()),
            Credentials::token(Some("in dexer"), tokens[0]).unwrap() + " roles=_db_updates,sales",
            Credentials::token(None, tokens[1]).unwrap(),
        ];
        let credentials: Credentials = lines.join("\n").parse().unwrap();
        let caller = async |headers: HeaderMap| {
            credentials.check(&headers, None, &Env::system()).await.unwrap().caller
        };
        let anna = caller(basic("an na:secret")).await;
        assert_eq!((anna.name(), anna.is_admin()), ("an na", false));
        assert!(anna.may_read(&crate::base::event::DbName::new("shop/a").unwrap()));
        let indexer = caller(headers(&format!("Bearer {}", tokens[0]))).await;
        assert_eq!(
            (indexer.name(), indexer.roles()),
            ("in dexer", &["_db_updates".into(), "sales".into()][..])
        );
        let other = caller(headers(&format!("Bearer {}", tokens[1]))).await;
        assert_eq!((other.name(), other.is_admin()), ("bearer", true));
    }
}
