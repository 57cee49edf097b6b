//! [`Sessions`] signs and verifies the cookies of `/_session`.
//!
//! A cookie contains the name of its user, when it expires, and when its session ends. `GET /_session` renews it: the new cookie is valid
//! for longer, but never beyond the end, which only a log-in sets. So a stolen cookie works for a few hours at most. Cookies are signed
//! with a key of the process, or with one that several nodes share through their configuration. The signature also covers the digest of the
//! secret, so a new secret ends the sessions of the old one. The server stores nothing, so it cannot end a single session.

use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, HeaderValue, header};
use base64ct::{Base64UrlUnpadded, Encoding};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

const COOKIE: &str = "AuthSession";

/// How long a cookie is valid unless it is renewed.
const UNRENEWED_MAX: Duration = Duration::from_hours(1);

/// How long a session can last in total.
const SESSION_MAX: Duration = Duration::from_hours(12);

const SIGNATURE_LEN: usize = 32;

/// Returns the wall-clock time in milliseconds.
pub(super) fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64)
}

/// Signs and verifies cookies.
pub(super) struct Sessions(Hmac<Sha256>);

/// A cookie for a client to keep.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NewCookie {
    /// An empty value ends the session in the client.
    pub value: String,
    /// How long the cookie is valid.
    age: Duration,
}

impl Sessions {
    pub fn new(key: &str) -> Self {
        Self(Hmac::new_from_slice(key.as_bytes()).expect("keys of any length are taken"))
    }

    /// Returns the first cookie of a session for `name`, whose secret has this `digest`.
    pub fn begin(&self, name: &str, digest: &str, now_ms: u64) -> NewCookie {
        self.sign(name, digest, now_ms, now_ms.saturating_add(SESSION_MAX.as_millis() as u64))
    }

    fn sign(&self, name: &str, digest: &str, now_ms: u64, end_ms: u64) -> NewCookie {
        let until_ms = now_ms.saturating_add(UNRENEWED_MAX.as_millis() as u64).min(end_ms);
        let mut bytes = format!("{name}:{until_ms:x}:{end_ms:x}").into_bytes();
        let signature = self.signature(&bytes, digest).finalize().into_bytes();
        bytes.extend_from_slice(&signature);
        let age = Duration::from_millis(until_ms.saturating_sub(now_ms));
        NewCookie { value: Base64UrlUnpadded::encode_string(&bytes), age }
    }

    /// Returns the name of the user in the cookie with this value, and a cookie that renews it, if the signature is right and the cookie
    /// has not expired. `digest_of` finds the digest of a name's secret.
    pub fn verify(
        &self,
        value: &str,
        now_ms: u64,
        digest_of: impl Fn(&str) -> String,
    ) -> Option<(String, NewCookie)> {
        let bytes = Base64UrlUnpadded::decode_vec(value).ok()?;
        let (said, signature) = bytes.split_at_checked(bytes.len().checked_sub(SIGNATURE_LEN)?)?;
        let (start, end_ms) = std::str::from_utf8(said).ok()?.rsplit_once(':')?;
        let (name, until_ms) = start.rsplit_once(':')?;
        let digest = digest_of(name);
        self.signature(said, &digest).verify_slice(signature).ok()?;
        let [until_ms, end_ms] = [until_ms, end_ms].map(|digits| u64::from_str_radix(digits, 16).ok());
        let is_valid = now_ms < until_ms?;
        is_valid.then_some((name.to_owned(), self.sign(name, &digest, now_ms, end_ms?)))
    }

    /// Returns the signature of a cookie's text.
    fn signature(&self, said: &[u8], digest: &str) -> Hmac<Sha256> {
        self.0.clone().chain_update(digest).chain_update(said)
    }
}

impl NewCookie {
    /// Creates the header that sets the cookie. If the request came over TLS, browsers send the cookie only over TLS.
    pub fn header(&self, request: &HeaderMap) -> HeaderValue {
        let Self { value, age } = self;
        let is_https = |proto: &HeaderValue| proto.as_bytes().eq_ignore_ascii_case(b"https");
        let secure = if request.get("x-forwarded-proto").is_some_and(is_https) { "; Secure" } else { "" };
        // Some clients ignore a cookie without `Expires`.
        let ends = if age.is_zero() { SystemTime::UNIX_EPOCH } else { SystemTime::now() + *age };
        let (ends, age) = (httpdate::fmt_http_date(ends), age.as_secs());
        let text = format!(
            "{COOKIE}={value}; Version=1; Expires={ends}; Max-Age={age}; Path=/; HttpOnly; SameSite=Strict{secure}"
        );
        HeaderValue::from_str(&text).expect("it is ASCII")
    }
}

/// Returns the value of the cookie in `headers`.
pub(super) fn cookie(headers: &HeaderMap) -> Option<&str> {
    let lines = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
    let mut pairs = lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, _)| *name == COOKIE).map(|(_, value)| value).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn minutes(minutes: u64) -> u64 {
        1_000 + minutes * 60_000
    }

    #[test]
    fn a_cookie_is_valid_for_its_time_its_key_and_its_secret() {
        let sessions = Sessions::new("1");
        let value = sessions.begin("an:na", "7", minutes(0)).value;
        let verify = |sessions: &Sessions, value: &str, minute, digest: u8| {
            sessions.verify(value, minutes(minute), |_| digest.to_string()).map(|(name, _)| name)
        };
        assert_eq!(verify(&sessions, &value, 59, 7), Some("an:na".to_owned()));
        assert_eq!(verify(&sessions, &value, 60, 7), None, "it is over");
        assert_eq!(verify(&sessions, &value, 0, 8), None, "the secret is another one");
        assert_eq!(verify(&Sessions::new("2"), &value, 0, 7), None);
        let longer = sessions.begin("an:na", "7", minutes(60)).value;
        let forged = format!("{}{}", &longer[..20], &value[20..]);
        for bad in ["", "x", "AAAA", &value[1..], &forged] {
            assert_eq!(verify(&sessions, bad, 0, 7), None, "{bad}");
        }
    }

    /// Regression: a session in use never ended.
    #[test]
    fn a_session_that_is_renewed_ends_with_its_first_end() {
        let sessions = Sessions::new("1");
        let mut cookie = sessions.begin("anna", "7", minutes(0));
        let mut now = 0;
        while let Some((_, renewed)) = sessions.verify(&cookie.value, minutes(now), |_| "7".to_owned()) {
            assert!(minutes(now) + renewed.age.as_millis() as u64 <= minutes(12 * 60));
            cookie = renewed;
            now += 1;
        }
        assert_eq!(now, 12 * 60);
    }

    #[test]
    fn a_cookie_is_found_among_others() {
        let headers = |text: &str| HeaderMap::from_iter([(header::COOKIE, text.parse().unwrap())]);
        assert_eq!(cookie(&headers("a=b; AuthSession=x-y; c=d")), Some("x-y"));
        assert_eq!(cookie(&headers("AuthSession=")), None);
        assert_eq!(cookie(&headers("XAuthSession=1")), None);
    }
}
