//! [`Sessions`] signs and verifies the cookies of `/_session`.
//!
//! A cookie names its user and the end of its session. It is signed with a key of the process, or with a key of the configuration,
//! so that several nodes accept each other's cookies. The signature also covers the hash of the password, so a new password ends
//! the sessions of the old one. The server stores nothing.

use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, HeaderValue, header};
use base64ct::{Base64UrlUnpadded, Encoding};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

const COOKIE: &str = "AuthSession";

/// How long an unused session lasts, as in CouchDB.
const LIFETIME: Duration = Duration::from_mins(10);

/// The age of a cookie at which the server sends a new one.
const RENEWED_AFTER: Duration = Duration::from_mins(1);

const SIGNATURE_LEN: usize = 32;

/// Signs and verifies cookies.
pub(super) struct Sessions(Hmac<Sha256>);

/// The session that a cookie describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Session {
    /// The name of the user.
    pub name: String,
    pub is_due: bool,
}

impl Sessions {
    pub fn new(key: &[u8; 32]) -> Self {
        Self(Hmac::new_from_slice(key).expect("keys of any length are taken"))
    }

    /// Returns the value of a cookie for `name`, whose password has this hash.
    pub fn sign(&self, name: &str, hash: &str, now_ms: u64) -> String {
        let until = now_ms.saturating_add(LIFETIME.as_millis() as u64);
        let mut bytes = format!("{name}:{until:x}:").into_bytes();
        let signature = self.signature(&bytes, hash).finalize().into_bytes();
        bytes.extend_from_slice(&signature);
        Base64UrlUnpadded::encode_string(&bytes)
    }

    /// Returns the session that the value of a cookie describes, if the signature is right and the session is not over; `hash_of`
    /// finds the hash of a name.
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

    /// Returns the signature of a cookie's text.
    fn signature(&self, said: &[u8], hash: &str) -> Hmac<Sha256> {
        self.0.clone().chain_update(said).chain_update(hash.as_bytes())
    }
}

/// Returns the value of the cookie in `headers`.
pub(super) fn cookie(headers: &HeaderMap) -> Option<&str> {
    let lines = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
    let mut pairs = lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, _)| *name == COOKIE).map(|(_, value)| value).filter(|value| !value.is_empty())
}

/// Makes the header that sets the cookie; an empty value ends the session. Behind TLS, browsers return the cookie over TLS only.
pub(super) fn set_cookie(value: &str, request: &HeaderMap, now_ms: u64) -> HeaderValue {
    let is_secure =
        request.get("x-forwarded-proto").is_some_and(|proto| proto.as_bytes().eq_ignore_ascii_case(b"https"));
    let secure = if is_secure { "; Secure" } else { "" };
    let age = if value.is_empty() { Duration::ZERO } else { LIFETIME };
    // Some clients ignore a cookie without `Expires`.
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
