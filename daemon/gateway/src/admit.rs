//! Who may ask, and how much at once.
//!
//! **Owns** the check of keys and the memory of bodies in flight. **Never** keeps a key: it compares digests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use pagedd_wire::gateway::Welcome;
use sha2::{Digest as _, Sha256};
use subtle::{ConditionallySelectable as _, ConstantTimeEq as _};

use crate::openai::ApiError;

/// Who asks: the number of the key, or nobody in particular on a port that needs none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caller {
    /// As in [`pagedd_wire::gateway::Request::key`].
    pub key: Option<u32>,
}

/// Checks the key of a request. All keys are compared, each in constant time.
///
/// # Errors
/// 401.
pub fn authorize(welcome: &Welcome, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let Some(keys) = &welcome.keys else { return Ok(Caller { key: None }) };
    let missing = || ApiError::unauthorized("this port needs a key: send `Authorization: Bearer <key>`");
    let header = headers.get(AUTHORIZATION).ok_or_else(missing)?.as_bytes();
    let (scheme, key) = header.split_at_checked(7).ok_or_else(missing)?;
    if !scheme.eq_ignore_ascii_case(b"bearer ") {
        return Err(missing());
    }
    let digest: [u8; 32] = Sha256::digest(key.trim_ascii()).into();
    let mut found = subtle::Choice::from(0);
    let mut number = 0;
    for entry in keys {
        let same = digest.ct_eq(&entry.sha256);
        number.conditional_assign(&entry.id, same);
        found |= same;
    }
    if found.into() {
        Ok(Caller { key: Some(number) })
    } else {
        Err(ApiError::unauthorized("the key is wrong, or was revoked"))
    }
}

/// Bytes of request bodies that are in memory at once.
#[derive(Default, Debug)]
pub struct Bodies {
    bytes: AtomicU64,
}

/// Room for one body. Dropped, it makes room for others.
#[derive(Debug)]
pub struct BodyRoom {
    bodies: Arc<Bodies>,
    bytes: u64,
}

impl Bodies {
    /// Bytes that all bodies together may have, beside at least two of the largest.
    const MOST: u64 = 64 << 20;

    /// Takes room for a body of `bytes`, where the largest may have `largest`.
    ///
    /// # Errors
    /// 503: too much is in flight.
    pub fn room(self: &Arc<Self>, bytes: u64, largest: u64) -> Result<BodyRoom, ApiError> {
        let most = Self::MOST.max(largest.saturating_mul(2));
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let room = BodyRoom { bodies: Arc::clone(self), bytes };
        if before.saturating_add(bytes) > most { Err(ApiError::busy()) } else { Ok(room) }
    }
}

impl Drop for BodyRoom {
    fn drop(&mut self) {
        self.bodies.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;
    use pagedd_wire::gateway::KeyEntry;

    fn welcome(keys: Option<&[(u32, &str)]>) -> Welcome {
        let keys = keys.map(|keys| {
            keys.iter().map(|(id, key)| KeyEntry { id: *id, sha256: Sha256::digest(key).into() }).collect()
        });
        Welcome {
            tenant: "t".to_owned(),
            model: "m".to_owned(),
            since: 0,
            max_model_len: 100,
            vocab_size: 100,
            default_max_tokens: None,
            max_n: 1,
            max_body: 100,
            max_connections: 10,
            header_timeout_ms: 1000,
            idle_timeout_ms: 1000,
            keys,
            closed: None,
        }
    }

    fn ask(welcome: &Welcome, header: Option<&str>) -> Result<Caller, u16> {
        let mut headers = HeaderMap::new();
        if let Some(header) = header {
            headers.insert(AUTHORIZATION, HeaderValue::from_str(header).unwrap());
        }
        authorize(welcome, &headers).map_err(|e| e.status)
    }

    #[test]
    fn a_key_opens_as_the_key_it_is() {
        let welcome = welcome(Some(&[(4, "four"), (7, "seven")]));
        assert_eq!(ask(&welcome, Some("Bearer four")), Ok(Caller { key: Some(4) }));
        assert_eq!(ask(&welcome, Some("bearer  seven")), Ok(Caller { key: Some(7) }));
        for wrong in [None, Some("Bearer fou"), Some("Bearer "), Some("four"), Some("Basic four"), Some("")] {
            assert_eq!(ask(&welcome, wrong), Err(401), "{wrong:?}");
        }
    }

    #[test]
    fn a_port_without_keys_is_open_and_one_whose_keys_are_all_revoked_is_not() {
        assert_eq!(ask(&welcome(None), None), Ok(Caller { key: None }));
        assert_eq!(ask(&welcome(Some(&[])), Some("Bearer x")), Err(401));
    }

    #[test]
    fn bodies_in_flight_are_bounded_and_leave_their_room() {
        let bodies = Arc::new(Bodies::default());
        let first = bodies.room(Bodies::MOST, 1).unwrap();
        assert_eq!(bodies.room(1, 1).unwrap_err().status, 503);
        drop(first);
        drop(bodies.room(1, 1).unwrap());
        assert_eq!(bodies.bytes.load(Ordering::Relaxed), 0);
    }
}
