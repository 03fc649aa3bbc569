//! Frames that wait to be written to the daemon.
//!
//! **Owns** the bound (I6). **Never** drops a frame that it took, and never refuses one that ends work.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use pagedd_wire::gateway::ToDaemon;
use pagedd_wire::{FrameError, encode};
use tokio::sync::Notify;

/// Bytes that may wait before questions are refused.
const MAX_BYTES: usize = 8 << 20;
/// Frames that may wait before questions are refused.
const MAX_FRAMES: usize = 4096;

/// The daemon reads too slowly: the question was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutboxFull;

/// The queue.
#[derive(Default, Debug)]
pub struct Outbox {
    queue: Mutex<Queue>,
    filled: Notify,
}

#[derive(Default, Debug)]
struct Queue {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Outbox {
    /// Takes an encoded question, unless too much waits already.
    ///
    /// # Errors
    /// [`OutboxFull`]: nothing was taken.
    pub fn ask(&self, frame: Vec<u8>) -> Result<(), OutboxFull> {
        let mut queue = self.lock();
        let over = queue.frames.len() >= MAX_FRAMES || queue.bytes + frame.len() > MAX_BYTES;
        if over && !queue.frames.is_empty() {
            return Err(OutboxFull);
        }
        Self::push(&mut queue, frame);
        drop(queue);
        self.filled.notify_one();
        Ok(())
    }

    /// Takes a message about an open request. There are few of them per request, and requests are bounded.
    ///
    /// # Errors
    /// The message has no encoding; those about open requests all have.
    pub fn tell(&self, message: &ToDaemon) -> Result<(), FrameError> {
        let frame = encode(message)?;
        Self::push(&mut self.lock(), frame);
        self.filled.notify_one();
        Ok(())
    }

    /// Waits for frames and takes all there are.
    pub async fn take(&self) -> VecDeque<Vec<u8>> {
        loop {
            let filled = self.filled.notified();
            {
                let mut queue = self.lock();
                if !queue.frames.is_empty() {
                    queue.bytes = 0;
                    return std::mem::take(&mut queue.frames);
                }
            }
            filled.await;
        }
    }

    fn push(queue: &mut Queue, frame: Vec<u8>) {
        queue.bytes += frame.len();
        queue.frames.push_back(frame);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_outbox_refuses_questions_and_takes_cancels() {
        let outbox = Outbox::default();
        outbox.ask(vec![0; MAX_BYTES + 1]).unwrap();
        assert_eq!(outbox.ask(vec![0]), Err(OutboxFull));
        outbox.tell(&ToDaemon::Cancel { request: [0; 16] }).unwrap();
        assert_eq!(outbox.lock().frames.len(), 2);
    }
}
