//! What a gateway counts by itself: connections, answers, latencies.
//!
//! **Owns** its own series. They start anew with the process, as every counter of a process does. **Never** labels by anything
//! that a client chooses.

use std::sync::atomic::AtomicI64;
use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Labels of an answer.
#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct Answered {
    route: &'static str,
    status: &'static str,
}

/// The series of this gateway.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    connections: Gauge<i64, AtomicI64>,
    answers: Family<Answered, Counter>,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
}

const FIRST_TOKEN: [f64; 18] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0];
const BETWEEN_TOKENS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0];
const WHOLE: [f64; 14] = [0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0];

impl Metrics {
    /// Series of a tenant, all at zero.
    #[must_use]
    pub fn new(tenant: &str) -> Self {
        let tenant = [("tenant".into(), tenant.to_owned().into())];
        let mut registry = Registry::with_prefix_and_labels("pagedd", tenant.into_iter());
        let connections = Gauge::default();
        let answers = Family::default();
        let first_token = Histogram::new(FIRST_TOKEN);
        let between_tokens = Histogram::new(BETWEEN_TOKENS);
        let whole = Histogram::new(WHOLE);
        registry.register(
            "gateway_connections",
            "Open connections of the tenant's port",
            connections.clone(),
        );
        registry.register(
            "http_responses",
            "Answers of the tenant's port, by route and class of status",
            answers.clone(),
        );
        registry.register(
            "time_to_first_token_seconds",
            "From the end of a request's head to its first token",
            first_token.clone(),
        );
        registry.register(
            "inter_token_latency_seconds",
            "Between two tokens of a choice",
            between_tokens.clone(),
        );
        registry.register(
            "e2e_request_latency_seconds",
            "From the end of a request's head to its last token",
            whole.clone(),
        );
        Self { registry, connections, answers, first_token, between_tokens, whole }
    }

    /// A connection opened.
    pub fn connected(&self) {
        self.connections.inc();
    }

    /// A connection closed.
    pub fn disconnected(&self) {
        self.connections.dec();
    }

    /// A request was answered.
    pub fn answered(&self, route: &'static str, status: u16) {
        let status = match status {
            200..300 => "2xx",
            400..500 => "4xx",
            _ => "5xx",
        };
        self.answers.get_or_create(&Answered { route, status }).inc();
    }

    /// The series in Prometheus' text format.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// The daemon's series and this gateway's as one page of Prometheus' text format 0.0.4.
///
/// Both parts are `OpenMetrics`, which differs in two points: its end marker would cut the page short in the middle, and a
/// counter's family is named there without the `_total` of its samples.
#[must_use]
pub fn joined(daemon: &str, own: &str) -> String {
    let mut text = String::with_capacity(daemon.len() + own.len());
    let mut help = None;
    for line in [daemon, own].into_iter().flat_map(str::lines) {
        if line == "# EOF" || line.is_empty() {
            continue;
        }
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
            continue;
        }
        let counter = line.strip_prefix("# TYPE ").and_then(|rest| rest.strip_suffix(" counter"));
        let total = if counter.is_some() { "_total" } else { "" };
        if let Some((name, about)) = help.take() {
            text.extend(["# HELP ", name, total, " ", about, "\n"]);
        }
        match counter {
            Some(name) => text.extend(["# TYPE ", name, "_total counter\n"]),
            None => text.extend([line, "\n"]),
        }
    }
    text
}

/// Measures one request, from its head on.
#[derive(Debug)]
pub struct Stopwatch {
    start: Instant,
    last: Vec<Option<Instant>>,
    any: bool,
}

impl Stopwatch {
    /// Started at the end of the request's head.
    #[must_use]
    pub fn new(start: Instant, n: u32) -> Self {
        Self { start, last: vec![None; n as usize], any: false }
    }

    /// A token of a choice arrived.
    pub fn token(&mut self, metrics: &Metrics, choice: u32) {
        let now = Instant::now();
        if !self.any {
            metrics.first_token.observe(now.duration_since(self.start).as_secs_f64());
            self.any = true;
        }
        if let Some(last) = self.last.get_mut(choice as usize)
            && let Some(before) = last.replace(now)
        {
            metrics.between_tokens.observe(now.duration_since(before).as_secs_f64());
        }
    }

    /// The last entry arrived.
    pub fn end(&self, metrics: &Metrics) {
        metrics.whole.observe(self.start.elapsed().as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_named_as_the_older_format_names_them() {
        let page = joined(
            "# HELP a_b Help me.\n# TYPE a_b counter\na_b_total 1\n# EOF\n",
            "# HELP g G.\n# TYPE g gauge\ng 2\n# EOF\n",
        );
        assert_eq!(
            page,
            "# HELP a_b_total Help me.\n# TYPE a_b_total counter\na_b_total 1\n# HELP g G.\n# TYPE g gauge\ng 2\n"
        );
    }

    #[test]
    fn both_parts_of_the_metrics_are_whole() {
        let metrics = Metrics::new("a");
        metrics.answered("chat", 200);
        let text = joined("x 1\n# EOF\n", &metrics.text());
        assert!(text.starts_with("x 1\n# HELP"), "{text}");
        assert!(!text.contains("# EOF"), "{text}");
        assert!(
            text.contains(r#"pagedd_http_responses_total{tenant="a",route="chat",status="2xx"} 1"#),
            "{text}"
        );
    }
}
