//! A frame: a little-endian `u32` length, then that many bytes of postcard.

use postcard::ser_flavors::Flavor;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest body of a frame, in bytes. A prompt of 131,072 tokens takes at most 655,360.
pub const MAX_FRAME: usize = 16 << 20;

const PREFIX: usize = 4;

/// The peer is broken, or not one of ours: close the connection.
#[derive(thiserror::Error, Debug)]
pub enum FrameError {
    /// The length prefix is over [`MAX_FRAME`]. Nothing was allocated for it.
    #[error("a frame of {bytes} bytes, at most {MAX_FRAME} are allowed")]
    TooLong {
        /// What the prefix claims.
        bytes: usize,
    },
    /// The body is not the expected message.
    #[error("a frame that is no {expected}: {source}")]
    Malformed {
        /// Name of the expected type.
        expected: &'static str,
        /// What postcard found.
        source: postcard::Error,
    },
}

/// One message as the bytes of one frame.
///
/// # Errors
/// [`FrameError::TooLong`] where the message does not fit a frame.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut bytes = Vec::new();
    append(message, &mut bytes)?;
    Ok(bytes)
}

/// Adds the frame of a message to `bytes`.
///
/// # Errors
/// As [`encode`]; nothing was added.
pub(crate) fn append<T: Serialize>(message: &T, bytes: &mut Vec<u8>) -> Result<(), FrameError> {
    Frame::append(bytes, |frame| frame.add(message))
}

/// A frame in the making, behind others.
pub(crate) struct Frame<'a>(&'a mut Vec<u8>);

impl<'a> Frame<'a> {
    /// Adds a frame to `bytes` whose body `fill` adds.
    ///
    /// # Errors
    /// What `fill` says, or [`FrameError::TooLong`]; nothing was added.
    pub fn append(
        bytes: &'a mut Vec<u8>,
        fill: impl FnOnce(&mut Frame<'_>) -> Result<(), FrameError>,
    ) -> Result<(), FrameError> {
        let start = bytes.len();
        bytes.extend([0; PREFIX]);
        let filled = fill(&mut Frame(bytes)).and_then(|()| match bytes.len() - start - PREFIX {
            body if body > MAX_FRAME => Err(FrameError::TooLong { bytes: body }),
            body => Ok(body as u32),
        });
        match filled {
            Ok(body) => bytes[start..start + PREFIX].copy_from_slice(&body.to_le_bytes()),
            Err(_) => bytes.truncate(start),
        }
        filled.map(drop)
    }

    /// What there is of it, and of those before.
    pub fn bytes(&mut self) -> &mut Vec<u8> {
        self.0
    }

    /// Adds a value.
    pub fn add<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), FrameError> {
        postcard::serialize_with_flavor(value, Tail(self.0))
            .map_err(|source| FrameError::Malformed { expected: std::any::type_name::<T>(), source })
    }
}

/// The end of bytes, where a value is added.
struct Tail<'a>(&'a mut Vec<u8>);

impl Flavor for Tail<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        // Most are short numbers: lengths that the compiler knows cost no call.
        match *bytes {
            [a] => self.0.push(a),
            [a, b] => self.0.extend_from_slice(&[a, b]),
            [a, b, c] => self.0.extend_from_slice(&[a, b, c]),
            _ => self.0.extend_from_slice(bytes),
        }
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// Bytes that arrived, and the frames in them. Holds at most one frame beyond what was pushed last.
#[derive(Default, Debug)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    /// `[0, start)` was consumed.
    start: usize,
}

impl FrameBuffer {
    /// An empty buffer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds what a read returned.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        } else if self.start > self.bytes.len() / 2 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame, or `None` until more bytes arrive.
    ///
    /// # Errors
    /// The stream cannot be read on after an error.
    pub fn next_frame<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let rest = &self.bytes[self.start..];
        let Some((prefix, rest)) = rest.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let length = u32::from_le_bytes(*prefix) as usize;
        if length > MAX_FRAME {
            return Err(FrameError::TooLong { bytes: length });
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let malformed = |source| FrameError::Malformed { expected: std::any::type_name::<T>(), source };
        let (message, left) = postcard::take_from_bytes(body).map_err(malformed)?;
        if !left.is_empty() {
            return Err(malformed(postcard::Error::DeserializeBadEncoding));
        }
        self.start += PREFIX + length;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sampling;
    use crate::gateway::{Idempotency, OnLeave, Rates, Refusal, Request, ToDaemon, ToGateway};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in_however_the_bytes_are_cut(
            messages in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..50), 0..20),
            cut in 1_usize..64,
        ) {
            let bytes: Vec<u8> = messages.iter().flat_map(|m| encode(m).unwrap()).collect();
            let mut buffer = FrameBuffer::new();
            let mut got: Vec<Vec<u32>> = Vec::new();
            for piece in bytes.chunks(cut) {
                buffer.push(piece);
                while let Some(message) = buffer.next_frame().unwrap() {
                    got.push(message);
                }
            }
            prop_assert_eq!(got, messages);
        }

        #[test]
        fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut buffer = FrameBuffer::new();
            buffer.push(&bytes);
            while let Ok(Some(_)) = buffer.next_frame::<ToDaemon>() {}
            let mut buffer = FrameBuffer::new();
            buffer.push(&bytes);
            while let Ok(Some(_)) = buffer.next_frame::<ToGateway>() {}
            let mut buffer = FrameBuffer::new();
            buffer.push(&bytes);
            while let Ok(Some(_)) = buffer.next_frame::<crate::worker::FromWorker>() {}
        }
    }

    proptest! {
        #[test]
        fn a_submission_and_its_answers_come_out_as_they_went_in(
            prompt in prop::collection::vec(any::<u32>(), 0..50),
            digests in any::<Option<([u8; 32], [u8; 32])>>(),
            on_leave in prop::sample::select(&[OnLeave::Cancel, OnLeave::RunOn, OnLeave::Background][..]),
            (ticket, id, repeated) in any::<(u64, [u8; 16], bool)>(),
        ) {
            let params = pagedd_core::SamplingParams { temperature: 0.5, seed: ticket, ..pagedd_core::SamplingParams::GREEDY };
            let sampling = Sampling::from(params);
            let idempotency = digests.map(|(key, body)| Idempotency { key, body });
            let (stop_ids, context) = (vec![2], vec![1, 2, 3]);
            let request =
                Request { prompt, sampling, n: 1, max_tokens: 5, stop_ids, on_leave, key: None, idempotency, context };
            let submit = ToDaemon::Submit { ticket, request: Box::new(request) };
            let mut buffer = FrameBuffer::new();
            buffer.push(&encode(&submit).unwrap());
            prop_assert_eq!(buffer.next_frame().unwrap(), Some(submit));
            for answer in [
                ToGateway::Accepted { ticket, request: id, repeated, rates: Rates::default() },
                ToGateway::Refused { ticket, refusal: Refusal::IdempotencyConflict },
            ] {
                buffer.push(&encode(&answer).unwrap());
                prop_assert_eq!(buffer.next_frame().unwrap(), Some(answer));
            }
        }
    }

    #[test]
    fn a_length_over_the_cap_is_refused_before_its_body_is_waited_for() {
        let mut buffer = FrameBuffer::new();
        buffer.push(&u32::MAX.to_le_bytes());
        assert!(matches!(buffer.next_frame::<u8>(), Err(FrameError::TooLong { .. })));
    }
}
