//! [`Access`] says who may send requests. [`Credentials`] recognizes callers by secrets and by the cookies of sessions.
//!
//! Secrets are long and random, so nobody guesses one. That is why there is no slow hash, no lock-out and no queue: a wrong secret
//! costs as little as a right one. The configuration holds the SHA-256 of each secret.
//!
//! # Invariants
//!
//! 1. One function ([`Table::find`]) decides about all secrets. It compares with every line in constant time, and looks at the name
//!    only after a line has matched. So the time tells neither which names exist nor which line matched.
//! 2. No two lines have the same name or the same secret. So a secret stands for one name, and a removed line leaves nothing behind.

use std::{fmt, str::FromStr, sync::Arc};

use axum::http::{HeaderMap, header};
use base64ct::{Base64, Encoding};
use parking_lot::RwLock;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::{
    Failure,
    caller::{Caller, Grant},
    cookie::{NewCookie, Sessions, cookie},
};
use crate::base::error::{Error, Result};

/// 128 bits in hexadecimal digits.
const SECRET_LEN_MIN: usize = 32;

/// The prefix of the line with the key that signs sessions.
const SESSIONS: &str = "sessions:key:";

/// What stands between a name and the digest of its secret.
const DIGEST: &str = "sha256:";

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

/// Names with the digests of their secrets, as a configuration holds them. A caller sends the secret as a bearer token, as the
/// password of its name, or once to begin a session. Clones share the lines.
///
/// ```
/// use notibus::http::Credentials;
///
/// let (anna, indexer) = (Credentials::new_secret()?, Credentials::new_secret()?);
/// let lines = [
///     "# who may ask".to_owned(),
///     Credentials::line("anna", &anna)?,
///     Credentials::line("indexer", &indexer)? + " roles=_db_updates reads=shop/*",
/// ];
/// let credentials: Credentials = lines.join("\n").parse()?;
/// // From now on only anna is known.
/// credentials.replace(&lines[1])?;
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Clone)]
pub struct Credentials(Arc<Inner>);

/// The state that clones share.
struct Inner {
    /// Signs sessions if no line has a key.
    own_key: Sha,
    table: RwLock<Table>,
}

/// The lines of a configuration.
struct Table {
    lines: Vec<Line>,
    /// The key that signs sessions, if a line has one.
    key: Option<Sha>,
}

struct Line {
    /// The SHA-256 of the secret.
    digest: Sha,
    caller: Caller,
}

/// The caller whose credentials were found right.
pub(super) struct Caught {
    pub caller: Caller,
    /// `None` if the caller was not recognized by the cookie of a session. Otherwise the new cookie, if one is due.
    #[expect(clippy::option_option, reason = "no session, one that goes on, and one that is renewed")]
    pub session: Option<Option<NewCookie>>,
}

impl Credentials {
    /// Returns a new secret: 32 random bytes of the operating system, as hexadecimal digits.
    ///
    /// Fails with [`Error::Invalid`] if the operating system has none.
    pub fn new_secret() -> Result<String> {
        Ok(hex(&random()?))
    }

    /// Returns the line of a configuration for `name` with `secret`. It makes `name` an admin, unless you append a space and a
    /// [`Grant`]. Logs, limits and layers use the name.
    ///
    /// Take the secret from [`Credentials::new_secret`], or from a source of the same kind: nothing here slows down those who try
    /// the secrets that people choose. Fails with [`Error::Invalid`] if the secret has less than 32 characters, if a character is
    /// not visible ASCII, or if the name is empty, begins with `#`, begins or ends with a space, or has a colon or a line break.
    pub fn line(name: &str, secret: &str) -> Result<String> {
        check_name(name)?;
        if secret.len() < SECRET_LEN_MIN || !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            let reason = format!("it needs at least {SECRET_LEN_MIN} characters, all of them visible ASCII");
            return Err(Error::invalid("secret", reason));
        }
        Ok(format!("{name}:{DIGEST}{}", hex(&sha(secret))))
    }

    /// Takes the lines of `text` instead of the present ones: from now on a secret that they lack is refused, and so are the
    /// sessions that began with it. Open feeds go on.
    ///
    /// Fails with [`Error::Invalid`] as parsing does; then the present lines stay.
    pub fn replace(&self, text: &str) -> Result<()> {
        let table = text.parse()?;
        *self.0.table.write() = table;
        Ok(())
    }

    /// Returns the caller that the credentials in `headers` name. Fails with 401 if there are no credentials or wrong ones.
    pub(super) fn check(&self, headers: &HeaderMap, now_ms: u64) -> Result<Caught, Failure> {
        let mut values = headers.get_all(header::AUTHORIZATION).iter();
        let Some(value) = values.next() else {
            let caught = cookie(headers).and_then(|value| self.resume(value, now_ms));
            return caught.ok_or_else(|| Failure::unauthorized("You are not a server admin."));
        };
        if values.next().is_some() {
            // A proxy in front may have checked the other one.
            return Err(Failure::bad_request("There are several headers Authorization."));
        }
        let caller = value.to_str().ok().and_then(|value| self.authorize(value));
        caller.map(|caller| Caught { caller, session: None }).ok_or_else(wrong)
    }

    /// Returns the caller that the value of an `Authorization` header names.
    fn authorize(&self, value: &str) -> Option<Caller> {
        let (scheme, given) = value.split_once(' ')?;
        let table = self.0.table.read();
        let line = if scheme.eq_ignore_ascii_case("bearer") {
            table.find(None, given.trim())
        } else if scheme.eq_ignore_ascii_case("basic") {
            let decoded = String::from_utf8(Base64::decode_vec(given.trim()).ok()?).ok()?;
            let (name, secret) = decoded.split_once(':')?;
            table.find(Some(name), secret)
        } else {
            None
        };
        line.map(|line| line.caller.clone())
    }

    /// Returns the caller of the session that the value of a cookie describes.
    fn resume(&self, value: &str, now_ms: u64) -> Option<Caught> {
        let table = self.0.table.read();
        let line = |name: &str| table.lines.iter().find(|line| line.caller.name() == name);
        // Nothing was ever signed with this digest, and unknown names take as long as known ones.
        let digest_of = |name: &str| line(name).map_or([0; 32], |line| line.digest);
        let session = self.sessions(&table).verify(value, now_ms, digest_of)?;
        let caller = line(&session.name)?.caller.clone();
        Some(Caught { caller, session: Some(session.renewed) })
    }

    /// Begins a session. Fails with 401 unless `name` has this `secret`.
    pub(super) fn log_in(
        &self,
        name: &str,
        secret: &str,
        now_ms: u64,
    ) -> Result<(Caller, NewCookie), Failure> {
        let table = self.0.table.read();
        let line = table.find(Some(name), secret).ok_or_else(wrong)?;
        Ok((line.caller.clone(), self.sessions(&table).begin(name, &line.digest, now_ms)))
    }

    fn sessions(&self, table: &Table) -> Sessions {
        Sessions::new(table.key.as_ref().unwrap_or(&self.0.own_key))
    }
}

impl Table {
    /// Returns the line of `secret`, if it belongs to `name`; to anybody, if there is no name. The work is the same for all names
    /// and secrets.
    fn find(&self, name: Option<&str>, secret: &str) -> Option<&Line> {
        let digest = sha(secret);
        let found = self.lines.iter().fold(None, |found, line| {
            if bool::from(line.digest.ct_eq(&digest)) { Some(line) } else { found }
        });
        found.filter(|line| name.is_none_or(|name| name == line.caller.name()))
    }
}

impl FromStr for Credentials {
    type Err = Error;

    /// Reads lines. [`Credentials::line`] makes them; each may end with a [`Grant`], and grants an admin's rights without one. Empty
    /// lines are allowed, and comments after `#`. A line `sessions:key:` with 64 hexadecimal digits holds the key that signs the
    /// cookies of sessions. Several nodes with the same key accept each other's cookies. Without such a line each process makes
    /// its own key.
    fn from_str(text: &str) -> Result<Self> {
        Ok(Self(Arc::new(Inner { own_key: random()?, table: RwLock::new(text.parse()?) })))
    }
}

impl FromStr for Table {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut table = Self { lines: Vec::new(), key: None };
        for (place, line) in text.lines().map(str::trim).enumerate() {
            let bad = |reason: &str| Error::invalid("credentials", format!("line {}: {reason}", place + 1));
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(digits) = line.strip_prefix(SESSIONS) {
                let key = parse_sha(digits).ok_or_else(|| bad("64 hexadecimal digits have to follow"))?;
                if table.key.replace(key).is_some() {
                    return Err(bad("there is a key already"));
                }
                continue;
            }
            let line = read_line(line).map_err(|error| bad(&error.to_string()))?;
            // Nobody could say which of two secrets counts, or whose name a secret stands for.
            let is_same =
                |known: &Line| known.caller.name() == line.caller.name() || known.digest == line.digest;
            if table.lines.iter().any(is_same) {
                return Err(bad("an earlier line has the same name or the same secret"));
            }
            table.lines.push(line);
        }
        if table.lines.is_empty() {
            return Err(Error::invalid("credentials", "there are none"));
        }
        Ok(table)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.0.table.read();
        let names: Vec<_> = table.lines.iter().map(|line| line.caller.name()).collect();
        f.debug_struct("Credentials").field("names", &names).finish_non_exhaustive()
    }
}

/// Reads a name with the digest of its secret and its grant. A line without a grant has that of an admin.
fn read_line(line: &str) -> Result<Line> {
    let invalid = || {
        let reason = "a line is NAME:sha256: with 64 hexadecimal digits, and perhaps a grant after a space";
        Error::invalid("line", reason)
    };
    let (name, rest) = line.split_once(':').ok_or_else(invalid)?;
    check_name(name)?;
    let rest = rest.strip_prefix(DIGEST).ok_or_else(invalid)?;
    let (digits, grant) = match rest.split_once(char::is_whitespace) {
        Some((digits, grant)) => (digits, grant.parse()?),
        None => (rest, Grant::admin()),
    };
    Ok(Line { digest: parse_sha(digits).ok_or_else(invalid)?, caller: Caller::new(name, grant) })
}

/// Fails if a line could not begin with this name.
fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.starts_with('#') || name.trim() != name || name.contains([':', '\n', '\r']) {
        let reason =
            "it is empty, begins with #, begins or ends with a space, or has a colon or a line break";
        return Err(Error::invalid("name", reason));
    }
    Ok(())
}

/// The answer to wrong credentials, in CouchDB's words.
fn wrong() -> Failure {
    Failure::unauthorized("Name or password is incorrect.")
}

/// Returns 32 bytes from the operating system. Fails if it has none.
fn random() -> Result<Sha> {
    let mut bytes = Sha::default();
    getrandom::fill(&mut bytes).map_err(|error| Error::invalid("credentials", error.to_string()))?;
    Ok(bytes)
}

fn sha(text: &str) -> Sha {
    Sha256::digest(text.as_bytes()).into()
}

fn hex(bytes: &Sha) -> String {
    bytes.iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}"))
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
    use axum::http::StatusCode;

    use super::*;

    const ANNA: &str = "anna:0123456789abcdef0123456789abcdef";
    const BOB: &str = "bob-0123456789abcdef0123456789abcdef";

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    fn basic(name: &str, secret: &str) -> HeaderMap {
        headers(&format!("Basic {}", Base64::encode_string(format!("{name}:{secret}").as_bytes())))
    }

    fn bearer(secret: &str) -> HeaderMap {
        headers(&format!("bearer {secret}"))
    }

    fn check(credentials: &Credentials, headers: &HeaderMap) -> Result<Caller, StatusCode> {
        credentials.check(headers, 0).map(|caught| caught.caller).map_err(|failure| failure.status())
    }

    fn two() -> [String; 2] {
        [("an na", ANNA), ("bob", BOB)].map(|(name, secret)| Credentials::line(name, secret).unwrap())
    }

    #[test]
    fn a_secret_is_a_token_and_the_password_of_its_own_name_only() {
        let credentials: Credentials = two().join("\n").parse().unwrap();
        for (name, secret) in [("an na", ANNA), ("bob", BOB)] {
            for headers in [basic(name, secret), bearer(secret)] {
                assert_eq!(check(&credentials, &headers).unwrap().name(), name);
            }
        }
        for wrong in [
            HeaderMap::new(),
            basic("an na", BOB),
            basic("carl", BOB),
            basic("", BOB),
            basic("bob", ""),
            headers("Basic ///"),
            headers("Basic"),
            bearer(""),
            bearer(&BOB[1..]),
            headers(&format!("Digest {BOB}")),
        ] {
            assert_eq!(check(&credentials, &wrong), Err(StatusCode::UNAUTHORIZED), "{wrong:?}");
        }
        let [secret, other] = [(); 2].map(|()| Credentials::new_secret().unwrap());
        assert!(secret != other && secret.len() == 64 && Credentials::line("carl", &secret).is_ok());
    }

    #[test]
    fn a_line_says_who_it_is_and_what_they_may() {
        let [anna, bob] = two();
        let lines = format!("# comment\n\n{anna}  reads=shop/*,a:b\n{bob} roles=_db_updates,sales");
        let credentials: Credentials = lines.parse().unwrap();
        let anna = check(&credentials, &bearer(ANNA)).unwrap();
        assert!(!anna.is_admin() && anna.may_read(&"shop/a".parse().unwrap()));
        let bob = check(&credentials, &bearer(BOB)).unwrap();
        assert_eq!(bob.roles(), ["_db_updates", "sales"]);
        assert!(format!("{credentials:?}").contains("an na"));
    }

    #[test]
    fn bad_lines_are_refused() {
        let [anna, bob] = two();
        let digest = anna.split_once(':').unwrap().1;
        for bad in [
            "",
            "# none",
            "anna",
            "anna:secret",
            "anna:sha256:12",
            "anna:$argon2id$v=19$m=8,t=1,p=1$AAAAAAAAAAA",
            "sessions:key:12",
            &format!(":{digest}"),
            &format!("bearer:anna:{digest}"),
            &format!("anna:{digest}0"),
            &format!("anna:{digest} roles=_amdin"),
            &format!("bob:{digest}\n{bob}"),
            &format!("{anna}\ncarl:{digest}"),
        ] {
            assert!(bad.parse::<Credentials>().is_err(), "{bad}");
        }
        for (name, secret) in
            [("a:b", BOB), ("", BOB), (" a", BOB), ("#a", BOB), ("a", &BOB[..31]), ("a", "")]
        {
            assert!(Credentials::line(name, secret).is_err(), "{name} {secret}");
        }
    }

    #[test]
    fn a_removed_or_changed_secret_ends_with_its_sessions_and_bad_lines_change_nothing() {
        let [anna, bob] = two();
        let credentials: Credentials = format!("{anna}\n{bob}").parse().unwrap();
        let (_, cookie) = credentials.log_in("bob", BOB, 0).unwrap();
        let cookie = HeaderMap::from_iter([(
            header::COOKIE,
            format!("AuthSession={}", cookie.value).parse().unwrap(),
        )]);
        let known = || [cookie.clone(), bearer(BOB)].map(|headers| check(&credentials, &headers).is_ok());
        assert_eq!(known(), [true; 2]);
        credentials.replace("bob").unwrap_err();
        assert_eq!(known(), [true; 2]);
        credentials.replace(&Credentials::line("bob", ANNA).unwrap()).unwrap();
        assert_eq!(known(), [false; 2]);
        credentials.replace(&format!("{anna}\n{bob} roles=x")).unwrap();
        assert_eq!(check(&credentials, &cookie).unwrap().roles(), ["x"], "the key of the process stays");
        credentials.replace(&anna).unwrap();
        assert_eq!(known(), [false; 2]);
    }
}
