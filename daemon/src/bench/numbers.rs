//! Middles and ends of what was measured.

/// The middle value, or the mean of the two; `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let ordered = ordered(values);
    let half = ordered.len() / 2;
    match ordered.len() {
        0 => None,
        n if n % 2 == 1 => Some(ordered[half]),
        _ => Some(f64::midpoint(ordered[half - 1], ordered[half])),
    }
}

/// The smallest value that at least `part` of all do not exceed (nearest rank), `part` in `(0, 1]`; `None` of nothing.
pub fn percentile(values: &[f64], part: f64) -> Option<f64> {
    let ordered = ordered(values);
    let rank = (part * ordered.len() as f64).ceil() as usize;
    ordered.get(rank.clamp(1, ordered.len().max(1)) - 1).copied()
}

/// `None` of nothing.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn ordered(values: &[f64]) -> Vec<f64> {
    let mut ordered = values.to_vec();
    ordered.sort_by(f64::total_cmp);
    ordered
}
