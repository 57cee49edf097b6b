//! [`Sessions`]: signs the cookies of `/_session`, and verifies them.
//!
//! A cookie says whose it is and until when, and is signed with a key of the process, or of the configuration, so that several nodes know
//! each other's. The signature goes by the hash of the password, too: a new password ends the sessions of the old one. Nothing is kept.

use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, HeaderValue, header};
use base64ct::{Base64UrlUnpadded, Encoding};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The name of the cookie.
const COOKIE: &str = "AuthSession";

/// How long a session lasts that is not used, as in CouchDB.
const LIFETIME: Duration = Duration::from_mins(10);

/// After how much of that a new cookie is sent.
const RENEWED_AFTER: Duration = Duration::from_mins(1);

/// The bytes of a signature.
const SIGNATURE_LEN: usize = 32;

/// Signs cookies.
pub(super) struct Sessions(Hmac<Sha256>);

/// A session that a cookie tells of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Session {
    /// Whose it is.
    pub name: String,
    /// Whether a new cookie is due.
    pub is_due: bool,
}

impl Sessions {
    /// Signs with this key.
    pub fn new(key: &[u8; 32]) -> Self {
        Self(Hmac::new_from_slice(key).expect("keys of any length are taken"))
    }

    /// The value of a cookie for `name`, whose password has this hash.
    pub fn sign(&self, name: &str, hash: &str, now_ms: u64) -> String {
        let until = now_ms.saturating_add(LIFETIME.as_millis() as u64);
        let mut bytes = format!("{name}:{until:x}:").into_bytes();
        let signature = self.signature(&bytes, hash).finalize().into_bytes();
        bytes.extend_from_slice(&signature);
        Base64UrlUnpadded::encode_string(&bytes)
    }

    /// The session that the value of a cookie tells of, if it was signed here and is not over; `hash_of` finds the hash of a name.
    pub fn verify(
        &self,
        value: &str,
        now_ms: u64,
        hash_of: impl Fn(&str) -> Option<String>,
    ) -> Option<Session> {
        let bytes = Base64UrlUnpadded::decode_vec(value).ok()?;
        let (said, signature) = bytes.split_at_checked(bytes.len().checked_sub(SIGNATURE_LEN)?)?;
        let (name, until) = std::str::from_utf8(said).ok()?.strip_suffix(':')?.rsplit_once(':')?;
        self.signature(said, &hash_of(name)?).verify_slice(signature).ok()?;
        let until = u64::from_str_radix(until, 16).ok()?;
        let left = Duration::from_millis(until.checked_sub(now_ms).filter(|&left| left > 0)?);
        Some(Session { name: name.to_owned(), is_due: left < LIFETIME.saturating_sub(RENEWED_AFTER) })
    }

    /// The signature of what a cookie says.
    fn signature(&self, said: &[u8], hash: &str) -> Hmac<Sha256> {
        self.0.clone().chain_update(said).chain_update(hash.as_bytes())
    }
}

/// The value of the cookie in `headers`.
pub(super) fn cookie(headers: &HeaderMap) -> Option<&str> {
    let lines = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
    let mut pairs = lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, _)| *name == COOKIE).map(|(_, value)| value).filter(|value| !value.is_empty())
}

/// The header that sets the cookie; an empty value ends the session. Behind TLS it goes back by TLS alone.
pub(super) fn set_cookie(value: &str, request: &HeaderMap, now_ms: u64) -> HeaderValue {
    let is_secure =
        request.get("x-forwarded-proto").is_some_and(|proto| proto.as_bytes().eq_ignore_ascii_case(b"https"));
    let secure = if is_secure { "; Secure" } else { "" };
    let age = if value.is_empty() { Duration::ZERO } else { LIFETIME };
    // Some clients keep no cookie without it.
    let ends = if age.is_zero() { age } else { Duration::from_millis(now_ms).saturating_add(age) };
    let ends = SystemTime::UNIX_EPOCH.checked_add(ends).unwrap_or(SystemTime::UNIX_EPOCH);
    let (ends, age) = (httpdate::fmt_http_date(ends), age.as_secs());
    let text = format!(
        "{COOKIE}={value}; Version=1; Expires={ends}; Max-Age={age}; Path=/; HttpOnly; SameSite=Strict{secure}"
    );
    HeaderValue::from_str(&text).expect("it is ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_valid_for_its_time_its_key_and_its_password() {
        let sessions = Sessions::new(&[1; 32]);
        let value = sessions.sign("an:na", "hash", 1_000);
        let hash = |hash: &'static str| move |name: &str| (name == "an:na").then(|| hash.to_owned());
        let minutes = |minutes: u64| 1_000 + minutes * 60_000;
        let fresh = Session { name: "an:na".to_owned(), is_due: false };
        assert_eq!(sessions.verify(&value, 1_000, hash("hash")), Some(fresh));
        assert!(sessions.verify(&value, minutes(5), hash("hash")).is_some_and(|session| session.is_due));
        assert_eq!(sessions.verify(&value, minutes(10), hash("hash")), None, "it is over");
        assert_eq!(sessions.verify(&value, 1_000, hash("other")), None, "the password is another one");
        assert_eq!(Sessions::new(&[2; 32]).verify(&value, 1_000, hash("hash")), None);
        let longer = sessions.sign("an:na", "hash", u64::MAX);
        let forged = format!("{}{}", &longer[..20], &value[20..]);
        for bad in ["", "x", "AAAA", &value[1..], &forged] {
            assert_eq!(sessions.verify(bad, 1_000, hash("hash")), None, "{bad}");
        }
    }

    #[test]
    fn a_cookie_is_found_among_others() {
        let headers = |text: &str| HeaderMap::from_iter([(header::COOKIE, text.parse().unwrap())]);
        assert_eq!(cookie(&headers("a=b; AuthSession=x-y; c=d")), Some("x-y"));
        assert_eq!(cookie(&headers("AuthSession=")), None);
        assert_eq!(cookie(&headers("XAuthSession=1")), None);
        let secure = set_cookie(
            "v",
            &HeaderMap::from_iter([("x-forwarded-proto".parse().unwrap(), "https".parse().unwrap())]),
            0,
        );
        assert!(secure.to_str().unwrap().ends_with("; HttpOnly; SameSite=Strict; Secure"));
    }
}
