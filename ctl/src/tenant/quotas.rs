//! Quotas on the command line of `tenant add` and `tenant set`.

use crate::failure::Failure;
use pagedd_control::{MAX_QUOTA, QuotaChanges, QuotaLimit};

/// What a tenant may ask for.
#[derive(Debug, clap::Args)]
pub struct QuotaArgs {
    /// Requests within any minute; `none` is without a limit
    #[arg(long, value_name = "N")]
    requests_per_minute: Option<String>,
    /// Tokens of prompts and answers within any minute; a request counts with all its `max_tokens` until it has ended
    #[arg(long, value_name = "N")]
    tokens_per_minute: Option<String>,
    /// Requests at once, those that wait included
    #[arg(long, value_name = "N")]
    max_concurrent: Option<String>,
    /// Requests that may wait for their first step
    #[arg(long, value_name = "N")]
    max_queued_requests: Option<String>,
    /// Prompt tokens of requests that may wait for their first step
    #[arg(long, value_name = "N")]
    max_queued_tokens: Option<String>,
}

impl QuotaArgs {
    /// What is set, checked before the daemon is asked.
    pub fn changes(&self) -> Result<QuotaChanges, Failure> {
        Ok(QuotaChanges {
            requests_per_minute: limit("--requests-per-minute", self.requests_per_minute.as_deref())?,
            tokens_per_minute: limit("--tokens-per-minute", self.tokens_per_minute.as_deref())?,
            max_concurrent: limit("--max-concurrent", self.max_concurrent.as_deref())?,
            max_queued_requests: limit("--max-queued-requests", self.max_queued_requests.as_deref())?,
            max_queued_tokens: limit("--max-queued-tokens", self.max_queued_tokens.as_deref())?,
        })
    }
}

fn limit(option: &str, text: Option<&str>) -> Result<Option<QuotaLimit>, Failure> {
    let read = |text: &str| match text {
        "none" | "default" => Ok(QuotaLimit::None),
        "0" => Err(Failure::Usage {
            message: format!("{option}: with 0 no request would ever be taken"),
            hint: Some(
                "to take none for now, use `pagedctl tenant suspend`; `none` is without a limit".to_owned(),
            ),
        }),
        text => {
            let shown: String = text.chars().filter(|c| !c.is_control()).take(40).collect();
            let number = text.replace('_', "").parse().ok().filter(|number| *number <= MAX_QUOTA);
            number.map(QuotaLimit::At).ok_or_else(|| {
                Failure::usage(format!(
                    "{option}: `{shown}` is neither `none` nor a number from 1 to {MAX_QUOTA}"
                ))
            })
        }
    };
    text.map(read).transpose()
}
