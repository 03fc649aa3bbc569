//! A blocking stream of frames that also carries file descriptors (`SCM_RIGHTS`).
//!
//! Fds travel beside the first byte of the frame that announces them, so they are queued no later than that frame is read.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::frame::{FrameBuffer, FrameError, append};
use crate::plan::{self, PlanParts, RowWriter};

/// Fds that one frame may carry.
const MAX_FDS: usize = 16;

/// Bytes of a read, and of a frame whose memory is kept for the next one.
const SCRATCH: usize = 64 << 10;

/// Why no message came or went.
#[derive(thiserror::Error, Debug)]
pub enum ChannelError {
    /// The peer is gone: it exited, or closed its end.
    #[error("the peer closed the connection")]
    Closed,
    /// Nothing came within the time given.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The peer is broken.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The frame announced an fd that did not come with it.
    #[error("the peer announced a file descriptor and sent none")]
    MissingFd,
    /// Any other error of the socket.
    #[error("socket: {0}")]
    Io(#[from] io::Error),
}

/// One end of a socket pair.
#[derive(Debug)]
pub struct Channel {
    socket: UnixStream,
    buffer: FrameBuffer,
    fds: VecDeque<OwnedFd>,
    scratch: Vec<u8>,
    /// Frames that go out with the next one; kept for its memory.
    held: Vec<u8>,
}

impl Channel {
    /// Takes over one end of a `SOCK_STREAM` pair, in blocking mode.
    ///
    /// # Errors
    /// The socket could not be made blocking.
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(false)?;
        let (scratch, held) = (vec![0; SCRATCH], Vec::new());
        Ok(Self { socket, buffer: FrameBuffer::new(), fds: VecDeque::new(), scratch, held })
    }

    /// Sends one message, with `fds` beside it, behind what is held.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] where the peer is gone.
    pub fn send<T: Serialize>(&mut self, message: &T, fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        append(message, &mut self.held)?;
        self.write(fds)
    }

    /// Holds [`ToWorker::Plan`](crate::worker::ToWorker::Plan), of which `row` writes the rows, until the next message is sent, or
    /// [`flush`](Self::flush): one write, and the peer wakes once.
    ///
    /// # Errors
    /// The plan does not fit a frame.
    pub fn hold_plan<R>(
        &mut self,
        plan: &PlanParts<'_, R>,
        row: impl Fn(&R, &mut RowWriter<'_>),
    ) -> Result<(), ChannelError> {
        Ok(plan::append(&mut self.held, plan, row)?)
    }

    /// Sends what is held.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] where the peer is gone.
    pub fn flush(&mut self) -> Result<(), ChannelError> {
        self.write(&[])
    }

    /// Sends all that is held. Nothing of it is sent again, whatever happens.
    fn write(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        let mut bytes = std::mem::take(&mut self.held);
        self.write_all(&bytes, fds)?;
        if bytes.capacity() <= SCRATCH {
            bytes.clear();
            self.held = bytes;
        }
        Ok(())
    }

    fn write_all(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        let mut sent = 0;
        while sent < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(
                    io::Error::new(io::ErrorKind::InvalidInput, "more fds than a frame carries").into()
                );
            }
            match sendmsg(&self.socket, &[IoSlice::new(&bytes[sent..])], &mut ancillary, SendFlags::NOSIGNAL)
            {
                Ok(n) => sent += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {
                    return Err(ChannelError::Closed);
                }
                Err(e) => return Err(io::Error::from(e).into()),
            }
        }
        Ok(())
    }

    /// Waits for the next message.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] at end of file.
    pub fn recv<T: DeserializeOwned>(&mut self) -> Result<T, ChannelError> {
        self.recv_until(None)
    }

    /// Waits for the next message, at most `limit`.
    ///
    /// # Errors
    /// [`ChannelError::TimedOut`] after `limit`; bytes that had come are kept for the next call.
    pub fn recv_timeout<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T, ChannelError> {
        self.recv_until(Some(limit))
    }

    fn recv_until<T: DeserializeOwned>(&mut self, limit: Option<Duration>) -> Result<T, ChannelError> {
        let start = Instant::now();
        loop {
            if let Some(message) = self.buffer.next_frame()? {
                return Ok(message);
            }
            if let Some(limit) = limit {
                let left = limit.checked_sub(start.elapsed()).ok_or(ChannelError::TimedOut(limit))?;
                let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
                match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timeout)) {
                    Ok(0) => return Err(ChannelError::TimedOut(limit)),
                    Ok(_) => {}
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(e) => return Err(io::Error::from(e).into()),
                }
            }
            self.fill()?;
        }
    }

    /// One read: bytes into the buffer, fds into their queue.
    fn fill(&mut self) -> Result<(), ChannelError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [IoSliceMut::new(&mut self.scratch)];
        let read = match recvmsg(&self.socket, &mut iov, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => got.bytes,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(rustix::io::Errno::CONNRESET) => return Err(ChannelError::Closed),
            Err(e) => return Err(io::Error::from(e).into()),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if read == 0 {
            return Err(ChannelError::Closed);
        }
        self.buffer.push(&self.scratch[..read]);
        Ok(())
    }

    /// The next fd that came beside a frame, in the order sent.
    ///
    /// # Errors
    /// [`ChannelError::MissingFd`] where there is none.
    pub fn take_fd(&mut self) -> Result<OwnedFd, ChannelError> {
        self.fds.pop_front().ok_or(ChannelError::MissingFd)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::{Plan, ToWorker};

    #[test]
    fn fds_arrive_in_order_with_the_frames_that_announce_them() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut a, mut b) = (Channel::new(a).unwrap(), Channel::new(b).unwrap());
        let files: Vec<_> =
            ["/dev/null", "/dev/zero"].iter().map(|p| std::fs::File::open(p).unwrap()).collect();
        a.send(&"two", &[files[0].as_fd(), files[1].as_fd()]).unwrap();
        a.send(&"none", &[]).unwrap();
        assert_eq!(b.recv::<String>().unwrap(), "two");
        let mut byte = [1];
        std::fs::File::from(b.take_fd().unwrap()).read_exact(&mut byte).unwrap_err();
        std::fs::File::from(b.take_fd().unwrap()).read_exact(&mut byte).unwrap();
        assert_eq!(byte, [0]);
        assert_eq!(b.recv::<String>().unwrap(), "none");
        assert!(matches!(b.take_fd(), Err(ChannelError::MissingFd)));
    }

    #[test]
    fn what_is_held_goes_out_before_the_next_message_and_in_order() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut a, mut b) = (Channel::new(a).unwrap(), Channel::new(b).unwrap());
        let plan = |id| PlanParts::<()> { id, begin: &[], copies: &[], rows: &[], end: &[] };
        let written = |id| ToWorker::Plan(Plan { id, ..Plan::default() });
        a.hold_plan(&plan(1), |(), _| {}).unwrap();
        let nothing = b.recv_timeout::<ToWorker>(Duration::from_millis(1));
        assert!(matches!(nothing, Err(ChannelError::TimedOut(_))));
        a.hold_plan(&plan(2), |(), _| {}).unwrap();
        a.send(&ToWorker::Collect, &[]).unwrap();
        for expected in [written(1), written(2), ToWorker::Collect] {
            assert_eq!(b.recv::<ToWorker>().unwrap(), expected);
        }
        a.hold_plan(&plan(3), |(), _| {}).unwrap();
        a.flush().unwrap();
        assert_eq!(b.recv::<ToWorker>().unwrap(), written(3));
    }

    #[test]
    fn a_closed_peer_and_a_silent_peer_are_told_apart() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut b = Channel::new(b).unwrap();
        assert!(matches!(b.recv_timeout::<u8>(Duration::from_millis(1)), Err(ChannelError::TimedOut(_))));
        drop(a);
        assert!(matches!(b.recv_timeout::<u8>(Duration::from_secs(10)), Err(ChannelError::Closed)));
        assert!(matches!(b.send(&0_u8, &[]), Err(ChannelError::Closed)));
    }

    use std::io::Read as _;
}
