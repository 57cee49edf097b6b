//! [`Access`]: who may ask; [`Credentials`]: by what they are known.
//!
//! A password is kept as an Argon2 hash with a salt of its own, which takes its time to verify: so a header that was found
//! right is known again by its digest, and unknown ones wait for their turn (`checks`). A token has to be long and random, and
//! is kept as its SHA-256. All comparisons take the same time whatever they compare.

use std::{
    collections::VecDeque,
    fmt,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
};

use argon2::{Argon2, PasswordHasher, password_hash::phc::PasswordHash};
use axum::http::{HeaderMap, StatusCode, header};
use base64ct::{Base64, Encoding};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::{
    Failure, Peer,
    checks::{Checks, Outcome},
    session::{Sessions, cookie},
};
use crate::base::{
    env::Env,
    error::{Error, Result},
};

/// How many verified headers are known again.
const VERIFIED_MAX: usize = 256;

/// The fewest characters of a token.
const TOKEN_LEN_MIN: usize = 16;

/// What stands before the key that signs sessions.
const SESSIONS: &str = "sessions:key:";

/// What stands before the digest of a token.
const BEARER: &str = "bearer:sha256:";

/// A SHA-256.
type Sha = [u8; 32];

/// Who may ask.
#[derive(Debug, Clone, Default)]
pub enum Access {
    /// Everyone who reaches the server is its admin. [`Hosts::Local`](super::Hosts::Local), the default, keeps the pages out that
    /// reach it through a browser.
    #[default]
    Open,
    /// Those who have credentials are its admins.
    Credentials(Credentials),
}

/// Names with passwords, and bearer tokens, as a configuration keeps them. Clones share what was verified.
///
/// ```
/// use notibus::http::Credentials;
///
/// let lines = [Credentials::password("anna", "correct horse")?, Credentials::token("0123456789abcdef0123456789abcdef")?];
/// let credentials: Credentials = format!("# who may ask\n{}\n", lines.join("\n")).parse()?;
/// assert!(!format!("{credentials:?}").contains("argon2"));
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Clone)]
pub struct Credentials(Arc<Inner>);

/// What clones share.
struct Inner {
    /// Verifies passwords.
    checks: Checks,
    /// The SHA-256 of each token.
    tokens: Vec<Sha>,
    /// The digests of the headers that were verified lately, and whose they are; newest last.
    verified: Mutex<VecDeque<(Sha, Arc<str>)>>,
    /// Signs the cookies of sessions.
    sessions: Sessions,
}

/// Who has asked.
#[derive(Debug)]
pub(super) struct Caught {
    /// By the name of the credentials.
    pub name: Arc<str>,
    /// What a new cookie is to be, if one is due of a session that it was known by; `None` without a session.
    #[expect(clippy::option_option, reason = "no session, one that goes on, and one that is renewed")]
    pub session: Option<Option<String>>,
}

impl Credentials {
    /// The line of a configuration for `name` with `password`. It takes a salt from the operating system.
    ///
    /// Fails with [`Error::Invalid`] if the name is empty, is `bearer` or has a colon or a line break, or the password is empty.
    pub fn password(name: &str, password: &str) -> Result<String> {
        if name.is_empty()
            || matches!(name, "bearer" | "sessions")
            || name.starts_with('#')
            || name.contains([':', '\n', '\r'])
        {
            return Err(Error::invalid(
                "name",
                "it is empty, \"bearer\", \"sessions\", a comment, or has a colon or a line break",
            ));
        }
        if password.is_empty() {
            return Err(Error::invalid("password", "it is empty"));
        }
        let hash: PasswordHash = Argon2::default()
            .hash_password(password.as_bytes())
            .map_err(|error| Error::invalid("password", error.to_string()))?;
        Ok(format!("{name}:{hash}"))
    }

    /// The line of a configuration for `token`. Fails with [`Error::Invalid`] if it has less than 16 characters, or others
    /// than visible ones of ASCII.
    pub fn token(token: &str) -> Result<String> {
        if token.len() < TOKEN_LEN_MIN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let reason = format!("it needs at least {TOKEN_LEN_MIN} characters, all of them visible ASCII");
            return Err(Error::invalid("token", reason));
        }
        Ok(sha(token.as_bytes()).iter().fold(BEARER.to_owned(), |line, byte| format!("{line}{byte:02x}")))
    }

    /// Whose credentials `headers` have, which come from `peer`. Fails with 401 if they have none, or wrong ones, and with 403 if
    /// the name is locked out for this address.
    pub(super) async fn check(
        &self,
        headers: &HeaderMap,
        peer: Option<Peer>,
        env: &Env,
    ) -> Result<Caught, Failure> {
        let Some(value) = headers.get(header::AUTHORIZATION) else {
            let caught = cookie(headers).and_then(|value| self.session(value, env));
            return caught.ok_or_else(|| Failure::unauthorized("You are not a server admin."));
        };
        let digest = sha(value.as_bytes());
        if let Some(name) = self.known(&digest) {
            return Ok(Caught { name, session: None });
        }
        let wrong = || Failure::unauthorized("Name or password is incorrect.");
        let (scheme, secret) = value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or_else(wrong)?;
        let name: Arc<str> = if scheme.eq_ignore_ascii_case("bearer") {
            self.find_token(secret.trim()).then(|| Arc::from("bearer")).ok_or_else(wrong)?
        } else if scheme.eq_ignore_ascii_case("basic") {
            let decoded =
                Base64::decode_vec(secret.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
            let decoded = decoded.ok_or_else(wrong)?;
            let (name, password) = decoded.split_once(':').ok_or_else(wrong)?;
            self.log_in(name, password, digest, peer, env).await?;
            name.into()
        } else {
            return Err(wrong());
        };
        let mut verified = self.0.verified.lock().unwrap_or_else(PoisonError::into_inner);
        if verified.len() >= VERIFIED_MAX {
            verified.pop_front();
        }
        verified.push_back((digest, Arc::clone(&name)));
        Ok(Caught { name, session: None })
    }

    /// Who is known by the value of a cookie.
    fn session(&self, value: &str, env: &Env) -> Option<Caught> {
        let Inner { sessions, checks, .. } = &*self.0;
        let session = sessions.verify(value, env.wall_ms(), |name| checks.hash_of(name))?;
        let renewed = session.is_due.then(|| self.sign(&session.name, env)).flatten();
        Some(Caught { name: session.name.into(), session: Some(renewed) })
    }

    /// The value of a cookie for `name`.
    fn sign(&self, name: &str, env: &Env) -> Option<String> {
        Some(self.0.sessions.sign(name, &self.0.checks.hash_of(name)?, env.wall_ms()))
    }

    /// The value of a cookie for `name`. Fails with 401 unless it has this `password`, and with 403 if it is locked out.
    pub(super) async fn begin_session(
        &self,
        name: &str,
        password: &str,
        peer: Option<Peer>,
        env: &Env,
    ) -> Result<String, Failure> {
        let digest = sha(format!("{}:{name}{password}", name.len()).as_bytes());
        self.log_in(name, password, digest, peer, env).await?;
        self.sign(name, env).ok_or_else(|| Failure::unauthorized("Name or password is incorrect."))
    }

    /// Fails with 401 unless `name` has this `password`, and with 403, as CouchDB, if it is locked out for this address.
    async fn log_in(
        &self,
        name: &str,
        password: &str,
        digest: Sha,
        peer: Option<Peer>,
        env: &Env,
    ) -> Result<(), Failure> {
        // Without a listener that tells them, all addresses are one.
        let address = peer.map_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED), |peer| peer.0);
        match self.0.checks.check(name, password, digest, address, env).await {
            Outcome::Right => Ok(()),
            Outcome::Wrong => Err(Failure::unauthorized("Name or password is incorrect.")),
            Outcome::Locked(rest) => {
                let reason = "Account is temporarily locked due to multiple authentication failures";
                Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", reason).retry_after(rest))
            }
        }
    }

    /// Whose the header with this digest is, if it was verified lately.
    fn known(&self, digest: &Sha) -> Option<Arc<str>> {
        let verified = self.0.verified.lock().unwrap_or_else(PoisonError::into_inner);
        let known = verified.iter().find(|(known, _)| bool::from(known.ct_eq(digest)));
        known.map(|(_, name)| Arc::clone(name))
    }

    /// Whether there is this token.
    fn find_token(&self, token: &str) -> bool {
        let digest = sha(token.as_bytes());
        self.0.tokens.iter().fold(false, |found, known| found | bool::from(known.ct_eq(&digest)))
    }
}

impl FromStr for Credentials {
    type Err = Error;

    /// Reads lines: those of [`Credentials::password`] and [`Credentials::token`], empty ones, and comments after `#`. A line
    /// `sessions:key:` with 64 hexadecimal digits is the key that signs the cookies of sessions, for nodes that are to know each
    /// other's; without it each process has one of its own.
    fn from_str(text: &str) -> Result<Self> {
        let (mut passwords, mut tokens, mut key) = (Vec::new(), Vec::new(), None);
        for (place, line) in text.lines().map(str::trim).enumerate() {
            let bad = |reason: &str| Error::invalid("credentials", format!("line {}: {reason}", place + 1));
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(digits) = line.strip_prefix(BEARER) {
                tokens.push(parse_sha(digits).ok_or_else(|| bad("64 hexadecimal digits have to follow"))?);
                continue;
            }
            if let Some(digits) = line.strip_prefix(SESSIONS) {
                key = Some(parse_sha(digits).ok_or_else(|| bad("64 hexadecimal digits have to follow"))?);
                continue;
            }
            let (name, hash) = line.split_once(':').ok_or_else(|| bad("there is no colon"))?;
            // Which of two is meant nobody can tell; a password that was to be replaced would still let in.
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
            passwords.push((name.to_owned(), hash));
        }
        if passwords.is_empty() && tokens.is_empty() {
            return Err(Error::invalid("credentials", "there are none"));
        }
        let key = key.map_or_else(random, Ok)?;
        let (checks, sessions) = (Checks::new(passwords), Sessions::new(&key));
        Ok(Self(Arc::new(Inner { checks, tokens, verified: Mutex::default(), sessions })))
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.checks.names().collect();
        f.debug_struct("Credentials").field("names", &names).field("tokens", &self.0.tokens.len()).finish()
    }
}

/// 32 bytes of the operating system's. Fails if it has none.
fn random() -> Result<Sha> {
    let mut bytes = Sha::default();
    getrandom::fill(&mut bytes).map_err(|error| Error::invalid("credentials", error.to_string()))?;
    Ok(bytes)
}

/// The SHA-256 of `bytes`.
fn sha(bytes: &[u8]) -> Sha {
    Sha256::digest(bytes).into()
}

/// A SHA-256 in hexadecimal digits.
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
        credentials.check(headers, None, &Env::system()).await.map(|caught| caught.name)
    }

    #[tokio::test]
    async fn only_the_right_ones_are_let_in() {
        let token = "a-token-of-some-length";
        let lines = [Credentials::password("anna", "s:e").unwrap(), Credentials::token(token).unwrap()];
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
        ] {
            assert!(bad.parse::<Credentials>().is_err(), "{bad}");
        }
        let [old, new] = ["old", "new"].map(|password| Credentials::password("anna", password).unwrap());
        assert!(format!("{old}\n{new}").parse::<Credentials>().is_err(), "the new one was once not known");
        assert!(Credentials::password("a:b", "x").is_err() && Credentials::password("a", "").is_err());
        assert!(Credentials::token("short").is_err());
    }
}
