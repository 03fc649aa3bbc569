//! Bodies: those that come in, within bounds, and those that go out as they are made.
//!
//! **Owns** the cap on what is read and the order of what is written. **Never** reads on behind a refusal for long.

use std::any::Any;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::openai::ApiError;

/// Bytes that are still read of a body that was refused, so that its sender reads the refusal instead of a reset.
const DRAIN_BYTES: usize = 64 << 20;
/// How long they are waited for.
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// Reads a body of at most `limit` bytes, within `time`.
///
/// # Errors
/// 413, 408, or 400 where the connection broke.
pub async fn collect(mut body: Incoming, limit: u64, time: Duration) -> Result<Bytes, ApiError> {
    let length = body.size_hint().lower();
    if length > limit {
        drain(body).await;
        return Err(ApiError::too_large(limit));
    }
    let mut whole = BytesMut::with_capacity(usize::try_from(length).unwrap_or(0));
    let read = timeout(time, async {
        while let Some(frame) = body.frame().await {
            let frame =
                frame.map_err(|_| ApiError::body("the connection broke before the body was complete"))?;
            if let Ok(data) = frame.into_data() {
                if (whole.len() + data.len()) as u64 > limit {
                    return Err(ApiError::too_large(limit));
                }
                whole.extend_from_slice(&data);
            }
        }
        Ok(())
    })
    .await;
    match read {
        Ok(Ok(())) => Ok(whole.freeze()),
        Ok(Err(error)) => {
            drain(body).await;
            Err(error)
        }
        Err(_) => Err(ApiError::body_timeout()),
    }
}

/// Reads the rest of a body that nobody wants, within bounds.
pub async fn drain(mut body: Incoming) {
    let reading = async {
        let mut read = 0;
        while let Some(Ok(frame)) = body.frame().await {
            read += frame.data_ref().map_or(0, Bytes::len);
            if read > DRAIN_BYTES {
                return;
            }
        }
    };
    // Whether it came to its end changes nothing.
    drop(timeout(DRAIN_TIME, reading).await);
}

/// The body of an answer.
#[derive(Debug)]
pub enum Body {
    /// All of it.
    Whole(Option<Bytes>),
    /// As it is made.
    Made(Made),
}

impl Body {
    /// A body that is all there.
    #[must_use]
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        Self::Whole(Some(bytes.into()))
    }
}

/// Where a maker puts what it made.
pub type Sink = mpsc::Sender<Bytes>;

/// A body that is made while it is sent: its maker runs when the connection wants more, and is dropped with it.
pub struct Made {
    maker: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    made: mpsc::Receiver<Bytes>,
}

impl std::fmt::Debug for Made {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Made").finish_non_exhaustive()
    }
}

impl Made {
    /// Parts that may wait for the connection.
    const WAITING: usize = 4;

    /// A body made by what `make` returns.
    pub fn by<F: Future<Output = ()> + Send + 'static>(make: impl FnOnce(Sink) -> F) -> Self {
        let (sink, made) = mpsc::channel(Self::WAITING);
        Self { maker: Some(Box::pin(make(sink))), made }
    }

    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if let Poll::Ready(Some(part)) = self.made.poll_recv(cx) {
            return Poll::Ready(Some(part));
        }
        if let Some(maker) = &mut self.maker {
            match poll_caught(maker.as_mut(), cx) {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => self.maker = None,
                Poll::Ready(Err(_)) => {
                    self.maker = None;
                    let mut last = Vec::new();
                    let error = ApiError::internal("the stream broke off by a fault of the server");
                    crate::openai::answer::push_event(&mut last, None, &error.to_json());
                    return Poll::Ready(Some(last.into()));
                }
            }
        }
        match self.made.poll_recv(cx) {
            Poll::Ready(None) if self.maker.is_some() => Poll::Pending,
            part => part,
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let part = match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take()),
            Self::Made(made) => made.poll_part(cx),
        };
        part.map(|part| part.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Made(_) => SizeHint::default(),
        }
    }
}

type Panicked = Box<dyn Any + Send>;

fn poll_caught<T>(
    future: Pin<&mut (dyn Future<Output = T> + Send)>,
    cx: &mut Context<'_>,
) -> Poll<Result<T, Panicked>> {
    // What a panic leaves behind is dropped with the future, and shared state is consistent at every await.
    match catch_unwind(AssertUnwindSafe(|| future.poll(cx))) {
        Ok(polled) => polled.map(Ok),
        Err(panicked) => Poll::Ready(Err(panicked)),
    }
}

/// Runs a future; a panic in it is an error instead of the end of its connection.
///
/// # Errors
/// It panicked.
pub async fn caught<T>(future: impl Future<Output = T> + Send) -> Result<T, ApiError> {
    let mut future: Pin<Box<dyn Future<Output = T> + Send + '_>> = Box::pin(future);
    let result = poll_fn(|cx| poll_caught(future.as_mut(), cx)).await;
    result.map_err(|_| ApiError::internal("the request met a fault of the server"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bug_32_a_panic_ends_its_own_request_only() {
        let error = caught(async { panic!("a fault") }).await.unwrap_err();
        assert_eq!(error.status, 500);
        let made = Made::by(|sink| async move {
            sink.send(Bytes::from_static(b"a")).await.unwrap();
            panic!("a fault");
        });
        let whole = Body::Made(made).collect().await.unwrap().to_bytes();
        let text = String::from_utf8(whole.to_vec()).unwrap();
        assert!(text.contains("\"type\":\"server_error\""), "{text}");
    }

    #[tokio::test]
    async fn what_is_made_arrives_in_order_and_ends() {
        let made = Made::by(|sink| async move {
            for part in 0..100_u8 {
                sink.send(Bytes::from(vec![part])).await.unwrap();
                tokio::task::yield_now().await;
            }
        });
        let whole = Body::Made(made).collect().await.unwrap().to_bytes();
        assert_eq!(whole, (0..100).collect::<Vec<u8>>());
    }
}
