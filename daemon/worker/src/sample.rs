//! From logits to drawn tokens.
//!
//! **Owns** what is reported of a draw. **Never** keeps state: a draw is a function of (logits, parameters, choice, position).

use pagedd_core::SamplingParams;
use pagedd_kernels::sample::{SampleError, draw, log_softmax_top, penalise};
use pagedd_wire::worker::Sampled;

/// One token to draw.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Request {
    /// Who draws.
    pub seq: u64,
    /// Which choice of its request.
    pub choice: u32,
    /// Where the token will stand.
    pub position: u32,
    /// How it is drawn.
    pub params: SamplingParams,
}

/// The tokens before the one to draw. Nobody asks for those of a sequence without penalties.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Past<'a> {
    /// What was given.
    pub prompt: &'a [u32],
    /// What was generated.
    pub output: &'a [u32],
}

/// Draws one token. What is reported of it is the model's own opinion, without penalties.
///
/// # Errors
/// The logits hold no distribution: NaN or infinite. One line for the one who asked.
pub fn sample(logits: &[f32], request: &Request, past: Past<'_>) -> Result<Sampled, String> {
    let Request { seq, choice, position, params } = request;
    let drawn = if params.penalties.is_none() {
        draw(logits, params, *choice, *position)
    } else {
        let mut logits = logits.to_vec();
        penalise(&mut logits, &params.penalties, past.prompt, past.output);
        draw(&logits, params, *choice, *position)
    };
    let token = drawn.map_err(|e| invalid(&e))?;
    let mut sampled = Sampled { seq: *seq, token: token.0, logprob: None, top: Vec::new() };
    if let Some(count) = params.logprobs {
        let report = log_softmax_top(logits, count.into(), token).map_err(|e| invalid(&e))?;
        sampled.logprob = Some(report.token);
        sampled.top = report.top.into_iter().map(|(token, logprob)| (token.0, logprob)).collect();
    }
    Ok(sampled)
}

/// What is said of a draw from logits that hold no distribution.
pub fn invalid(error: &SampleError) -> String {
    format!("the model gave no valid logits: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(logprobs: Option<u8>) -> Request {
        let params = SamplingParams { logprobs, ..SamplingParams::GREEDY };
        Request { seq: 4, choice: 0, position: 9, params }
    }

    #[test]
    fn a_greedy_draw_reports_what_was_asked_for() {
        let logits = [0.0, 2.0, 1.0, -5.0];
        let plain = sample(&logits, &request(None), Past::default()).unwrap();
        assert_eq!(plain, Sampled { seq: 4, token: 1, logprob: None, top: vec![] });
        let full = sample(&logits, &request(Some(2)), Past::default()).unwrap();
        assert_eq!(full.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(full.logprob, Some(full.top[0].1));
        assert!((full.top[0].1 - full.top[1].1 - 1.0).abs() < 1e-6);
    }

    #[test]
    fn a_penalty_changes_what_is_drawn_and_not_what_is_reported() {
        let logits = [0.0, 2.0, 1.5, -5.0];
        let mut asked = request(Some(1));
        asked.params.penalties.presence = 1.0;
        let past = Past { prompt: &[2], output: &[1] };
        let sampled = sample(&logits, &asked, past).unwrap();
        assert_eq!(sampled.token, 2, "1 was there, and 2 only in the prompt");
        let plain = sample(&logits, &request(Some(1)), past).unwrap();
        assert_eq!((plain.token, sampled.top), (1, plain.top));
    }

    #[test]
    fn logits_without_a_distribution_are_an_error_and_no_panic() {
        for bad in [f32::NAN, f32::INFINITY] {
            let error = sample(&[0.0, bad, 1.0], &request(Some(3)), Past::default()).unwrap_err();
            assert!(error.starts_with("the model gave no valid logits"), "{error}");
        }
    }
}
