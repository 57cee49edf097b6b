//! [`Credentials`] recognizes callers by secrets and by session cookies.
//!
//! Secrets are long and random, so nobody can guess one. That is why there is no slow hash, no lock-out and no queue: a wrong secret costs
//! as little as a right one. The configuration holds the SHA-256 of each secret.
//!
//! # Invariants
//!
//! 1. One function ([`Table::find`]) checks all secrets. It compares a secret with every line in constant time, and looks at the name only
//!    after a line has matched. So the timing reveals neither which names exist nor which line matched.
//! 2. No two lines have the same name or the same secret. So a secret belongs to one name, and removing a line leaves nothing behind.

use std::{convert::Infallible, env, fmt, path::Path, str::FromStr, sync::Arc, time::Duration};

use axum::http::{HeaderMap, header};
use base64ct::{Base64, Encoding};
use parking_lot::{Mutex, RwLock};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::watch;

use super::{
    Caller, Failure, Grant,
    cookie::{NewCookie, Sessions, cookie},
};
use crate::base::error::{Error, Result};

/// The length of 128 bits in hexadecimal digits.
const SECRET_LEN_MIN: usize = 32;

/// The prefix of the line with the key that signs sessions.
const SESSIONS: &str = "sessions:key:";

/// What separates a name from the digest of its secret.
const DIGEST: &str = "sha256:";

/// The interval at which a credentials file is read.
const REREAD_INTERVAL: Duration = Duration::from_secs(1);

/// The environment variable with the folder in which systemd puts the credentials of a service.
const SERVICE_FOLDER: &str = "CREDENTIALS_DIRECTORY";

/// A SHA-256, or another 32 bytes, as hexadecimal digits in lower case.
type Digits = String;

/// The lines of a configuration: names with the digests of their secrets. A caller sends the secret as a bearer token, as the password for
/// its name, or once to begin a session. Clones share the lines.
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
/// // From now on only the indexer is known.
/// credentials.replace(&lines[2])?;
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Clone)]
pub struct Credentials(Arc<Inner>);

/// The state that clones share.
struct Inner {
    /// The key that signs sessions if no line has one.
    own_key: Digits,
    table: RwLock<Table>,
    /// Why the file was rejected when it was last read.
    trouble: Mutex<Option<String>>,
}

/// The lines of a configuration.
#[derive(Default)]
struct Table {
    lines: Vec<Line>,
    /// The key that signs sessions, if a line has one.
    key: Option<Digits>,
}

struct Line {
    name: Arc<str>,
    /// The SHA-256 of the secret.
    digest: Digits,
    grant: Arc<Grant>,
    /// Dropped with the line, which ends the feeds of its callers.
    valid: watch::Sender<()>,
}

impl Line {
    fn caller(&self) -> Caller {
        Caller::new(Arc::clone(&self.name), Arc::clone(&self.grant)).valid_while(self.valid.subscribe())
    }
}

impl Credentials {
    /// Returns a new secret: 32 random bytes from the operating system, as hexadecimal digits.
    ///
    /// Fails with [`Error::Invalid`] if the operating system provides none.
    pub fn new_secret() -> Result<String> {
        random()
    }

    /// Returns a configuration line for `name` with `secret`. The line makes `name` an admin, unless you append a space and a [`Grant`].
    /// Logs, limits and layers use the name.
    ///
    /// Take the secret from [`Credentials::new_secret`], or from an equally good source: nothing here slows down an attacker who guesses
    /// secrets that people would choose. Fails with [`Error::Invalid`] if the secret has fewer than 32 characters, if a character is not
    /// visible ASCII, or if the name is empty, begins with `#`, begins or ends with a space, or has a colon or a line break.
    pub fn line(name: &str, secret: &str) -> Result<String> {
        check_name(name)?;
        if secret.len() < SECRET_LEN_MIN || !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            let reason = format!("it needs at least {SECRET_LEN_MIN} characters, all of them visible ASCII");
            return Err(Error::invalid("secret", reason));
        }
        Ok(format!("{name}:{DIGEST}{}", sha(secret)))
    }

    /// Replaces the current lines with those of `text`. From then on a secret that is not among them is refused, and so are the sessions
    /// that began with it; its open feeds end. With an empty text everybody is refused.
    ///
    /// Fails with [`Error::Invalid`] if `text` cannot be parsed; the current lines then stay valid.
    pub fn replace(&self, text: &str) -> Result<()> {
        let mut table: Table = text.parse()?;
        let mut present = self.0.table.write();
        for line in &mut table.lines {
            let is_same = |known: &&Line| (&known.name, &known.digest) == (&line.name, &line.digest);
            if let Some(known) = present.lines.iter().find(is_same).filter(|known| known.grant == line.grant)
            {
                line.valid = known.valid.clone();
            }
        }
        *present = table;
        Ok(())
    }

    /// Reads the lines of `file`.
    ///
    /// Fails with [`Error::Invalid`] if the file is unreadable or malformed, or if users other than its owner may read or write it.
    pub fn read(file: &Path) -> Result<Self> {
        let of_file = |error: Error| Error::invalid("credentials", format!("{}: {error}", file.display()));
        read(file).and_then(|text| text.parse()).map_err(of_file)
    }

    /// Keeps rereading `file`, and uses its lines as [`Credentials::replace`] does, within two seconds of a change. If the file is invalid,
    /// the lines read before stay valid; the log says so once, and the status says so until the file is valid again.
    pub async fn follow(&self, file: &Path) -> Infallible {
        let mut last = None;
        loop {
            let path = file.to_owned();
            let text = tokio::task::spawn_blocking(move || read(&path).map_err(|error| error.to_string()));
            let text = text.await.unwrap_or_else(|panic| Err(panic.to_string()));
            if last.as_ref() != Some(&text) {
                let taken =
                    text.clone().and_then(|text| self.replace(&text).map_err(|error| error.to_string()));
                if let Err(error) = &taken {
                    tracing::error!(
                        error,
                        "the file of credentials is no good; the last good lines stay valid"
                    );
                }
                *self.0.trouble.lock() = taken.err();
                last = Some(text);
            }
            tokio::time::sleep(REREAD_INTERVAL).await;
        }
    }

    /// Returns why the file was rejected when it was last read; `None` if it was not.
    pub(super) fn trouble(&self) -> Option<String> {
        self.0.trouble.lock().clone()
    }

    /// Returns the caller that the credentials in `headers` identify. Fails with 401 if there are no credentials, or wrong ones.
    pub(super) fn check(&self, headers: &HeaderMap, now_ms: u64) -> Result<Caller, Failure> {
        let mut values = headers.get_all(header::AUTHORIZATION).iter();
        let Some(value) = values.next() else {
            return match self.session(headers, now_ms) {
                Some((caller, _)) => Ok(caller),
                None => Err(Failure::unauthorized("You are not a server admin.")),
            };
        };
        if values.next().is_some() {
            // A proxy in front may have checked the other header.
            return Err(Failure::bad_request("There are several Authorization headers."));
        }
        value.to_str().ok().and_then(|value| self.find(value)).ok_or_else(wrong)
    }

    /// Returns the caller that the value of an `Authorization` header identifies.
    fn find(&self, value: &str) -> Option<Caller> {
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
        line.map(Line::caller)
    }

    /// Returns the caller whose cookie is in `headers`, and the cookie that renews it.
    pub(super) fn session(&self, headers: &HeaderMap, now_ms: u64) -> Option<(Caller, NewCookie)> {
        let table = self.0.table.read();
        let line = |name: &str| table.lines.iter().find(|line| *line.name == *name);
        // No cookie was ever signed with this digest. Checking one against it makes unknown names take as long as known ones.
        let digest_of = |name: &str| line(name).map_or_else(|| "0".repeat(64), |line| line.digest.clone());
        let (name, renewed) = self.sessions(&table).verify(cookie(headers)?, now_ms, digest_of)?;
        Some((line(&name)?.caller(), renewed))
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
        Ok((line.caller(), self.sessions(&table).begin(name, &line.digest, now_ms)))
    }

    fn sessions(&self, table: &Table) -> Sessions {
        Sessions::new(table.key.as_ref().unwrap_or(&self.0.own_key))
    }
}

impl Table {
    /// Returns the line with `secret`, if its name is `name` or no name was given. The work is the same for all names and secrets.
    fn find(&self, name: Option<&str>, secret: &str) -> Option<&Line> {
        let digest = sha(secret);
        let found = self.lines.iter().fold(None, |found, line| {
            if bool::from(line.digest.as_bytes().ct_eq(digest.as_bytes())) { Some(line) } else { found }
        });
        found.filter(|line| name.is_none_or(|name| *name == *line.name))
    }
}

impl FromStr for Credentials {
    type Err = Error;

    /// Parses lines as [`Credentials::line`] makes them; each may end with a [`Grant`], and without one it grants the rights of an admin.
    /// Empty lines and comments that begin with `#` are allowed. A line `sessions:key:` with 64 hexadecimal digits holds the key that signs
    /// the cookies of sessions. Several nodes with the same key accept each other's cookies. Without such a line each process makes its own
    /// key. Without any lines, every caller is refused.
    fn from_str(text: &str) -> Result<Self> {
        let inner =
            Inner { own_key: random()?, table: RwLock::new(text.parse()?), trouble: Mutex::default() };
        Ok(Self(Arc::new(inner)))
    }
}

impl FromStr for Table {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut table = Self::default();
        for (place, line) in text.lines().map(str::trim).enumerate() {
            let bad = |reason: &str| Error::invalid("credentials", format!("line {}: {reason}", place + 1));
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(digits) = line.strip_prefix(SESSIONS) {
                let key = digits_of(digits).ok_or_else(|| bad("64 hexadecimal digits must follow"))?;
                if table.key.replace(key).is_some() {
                    return Err(bad("there is already a key"));
                }
                continue;
            }
            let line = read_line(line).map_err(|error| bad(&error.to_string()))?;
            // Otherwise it would be unclear which of two secrets counts, or which name a secret belongs to.
            if table.lines.iter().any(|known| known.name == line.name || known.digest == line.digest) {
                return Err(bad("an earlier line has the same name or the same secret"));
            }
            table.lines.push(line);
        }
        Ok(table)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.0.table.read();
        let names: Vec<_> = table.lines.iter().map(|line| &line.name).collect();
        f.debug_struct("Credentials").field("names", &names).finish_non_exhaustive()
    }
}

/// Reads a name with the digest of its secret and its grant. A line without a grant has the grant of an admin.
fn read_line(line: &str) -> Result<Line> {
    let invalid = || {
        let reason =
            "a line is NAME:sha256: with 64 hexadecimal digits, and optionally a grant after a space";
        Error::invalid("line", reason)
    };
    let (name, rest) = line.split_once(':').ok_or_else(invalid)?;
    check_name(name)?;
    let rest = rest.strip_prefix(DIGEST).ok_or_else(invalid)?;
    let (digits, grant) = match rest.split_once(char::is_whitespace) {
        Some((digits, grant)) => (digits, grant.parse()?),
        None => (rest, Grant::admin()),
    };
    let digest = digits_of(digits).ok_or_else(invalid)?;
    Ok(Line { name: name.into(), digest, grant: Arc::new(grant), valid: watch::Sender::new(()) })
}

/// Reads a file. Fails if users other than its owner may read or write it. The group may read files that systemd provides for the service,
/// because a dynamic user has its own group.
fn read(file: &Path) -> Result<String> {
    let failed = |error: std::io::Error| Error::invalid("credentials", error.to_string());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let metadata = std::fs::metadata(file).map_err(failed)?;
        let mode = metadata.permissions().mode() & 0o777;
        let is_of_service =
            env::var_os(SERVICE_FOLDER).is_some_and(|it| file.parent() == Some(Path::new(&it)));
        let refused = if is_of_service { 0o037 } else { 0o077 };
        if metadata.is_file() && mode & refused != 0 {
            let reason = format!("others may read or write it ({mode:o}): chmod 600 {}", file.display());
            return Err(Error::invalid("credentials", reason));
        }
    }
    std::fs::read_to_string(file).map_err(failed)
}

/// Fails if a line cannot begin with this name.
fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.starts_with('#') || name.trim() != name || name.contains([':', '\n', '\r']) {
        let reason =
            "it is empty, begins with #, begins or ends with a space, or has a colon or a line break";
        return Err(Error::invalid("name", reason));
    }
    Ok(())
}

/// Returns the answer to wrong credentials, with CouchDB's message.
fn wrong() -> Failure {
    Failure::unauthorized("Name or password is incorrect.")
}

/// Returns 32 random bytes from the operating system. Fails if it provides none.
fn random() -> Result<Digits> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| Error::invalid("credentials", error.to_string()))?;
    Ok(hex(&bytes))
}

fn sha(text: &str) -> Digits {
    hex(&Sha256::digest(text.as_bytes()).into())
}

fn hex(bytes: &[u8; 32]) -> Digits {
    bytes.iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}"))
}

/// Returns `text` in lower case if it is the hexadecimal digits of 32 bytes.
fn digits_of(text: &str) -> Option<Digits> {
    (text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| text.to_ascii_lowercase())
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
        credentials.check(headers, 0).map_err(|failure| failure.status())
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
            let refused = check(&credentials, &wrong).err();
            assert_eq!(refused, Some(StatusCode::UNAUTHORIZED), "{wrong:?}");
        }
        let [secret, other] = [(); 2].map(|()| Credentials::new_secret().unwrap());
        assert!(secret != other && secret.len() == 64 && Credentials::line("carl", &secret).is_ok());
    }

    #[test]
    fn bad_lines_are_refused_and_no_line_refuses_everybody() {
        let [anna, bob] = two();
        let digest = anna.split_once(':').unwrap().1;
        for bad in [
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
        let none: Credentials = "# nobody\n\n".parse().unwrap();
        assert!(check(&none, &bearer(BOB)).is_err());
    }

    /// Cause: a feed was checked when it began and never again, so a removed name could continue to read.
    #[test]
    fn a_removed_or_changed_line_ends_its_sessions_and_callers_and_bad_lines_change_nothing() {
        let [anna, bob] = two();
        let credentials: Credentials = format!("{anna}\n{bob}").parse().unwrap();
        let (caller, cookie) = credentials.log_in("bob", BOB, 0).unwrap();
        let cookie = HeaderMap::from_iter([(
            header::COOKIE,
            format!("AuthSession={}", cookie.value).parse().unwrap(),
        )]);
        let known = || [cookie.clone(), bearer(BOB)].map(|headers| check(&credentials, &headers).is_ok());
        credentials.replace("bob").unwrap_err();
        credentials.replace(&format!("{bob}\n{anna}")).unwrap();
        assert_eq!((known(), caller.is_gone()), ([true; 2], false));
        credentials.replace(&Credentials::line("bob", ANNA).unwrap()).unwrap();
        assert_eq!((known(), caller.is_gone()), ([false; 2], true));
        credentials.replace(&format!("{anna}\n{bob} roles=x")).unwrap();
        let caller = check(&credentials, &cookie).unwrap();
        assert_eq!(caller.roles(), ["x"], "the key of the process stays");
        credentials.replace(&format!("{anna}\n{bob}")).unwrap();
        assert!(caller.is_gone(), "its grant was another one");
        credentials.replace(&anna).unwrap();
        assert_eq!(known(), [false; 2]);
    }
}
