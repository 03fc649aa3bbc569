//! A plan as its frame, written from whatever the daemon keeps it as.
//!
//! **Owns** the bytes of rows: those that serde gives [`Row`](crate::worker::Row). A plan has hundreds of them a hundred times a second, and
//! so none is made only to be encoded.

use crate::frame::{Frame, FrameError};
use crate::worker::{Begin, BlockCopy, Input};

/// Place of [`ToWorker::Plan`](crate::worker::ToWorker::Plan) among its kind.
const PLAN: u64 = 2;
/// Places of the kinds of [`Input`].
const KNOWN: u64 = 0;
const SAMPLED: u64 = 1;

/// A [`Plan`](crate::worker::Plan) with rows of another kind.
#[derive(Clone, Copy, Debug)]
pub struct PlanParts<'a, R> {
    /// Its id.
    pub id: u64,
    /// Sequences first seen in it.
    pub begin: &'a [Begin],
    /// Block copies.
    pub copies: &'a [BlockCopy],
    /// What is computed.
    pub rows: &'a [R],
    /// Sequences that no later plan names.
    pub end: &'a [u64],
}

/// A [`Row`](crate::worker::Row) in parts.
#[derive(Clone, Copy, Debug)]
pub struct RowParts<I, B, S> {
    /// Whose.
    pub seq: u64,
    /// First position computed.
    pub start: u32,
    /// Tokens at the row's positions.
    pub inputs: I,
    /// First entry of the block table that changes.
    pub from: u32,
    /// New entries.
    pub blocks: B,
    /// Who draws.
    pub samples: S,
    /// How many of the inputs are guesses.
    pub drafts: u32,
}

/// Takes the parts of one row.
#[derive(Debug)]
pub struct RowWriter<'a>(&'a mut Vec<u8>);

impl RowWriter<'_> {
    /// Writes the row.
    pub fn write<I, B, S>(&mut self, row: RowParts<I, B, S>)
    where
        I: ExactSizeIterator<Item = Input>,
        B: ExactSizeIterator<Item = u32>,
        S: ExactSizeIterator<Item = u64>,
    {
        self.number(row.seq);
        self.number(row.start.into());
        self.number(row.inputs.len() as u64);
        for input in row.inputs {
            match input {
                Input::Known(token) => {
                    self.number(KNOWN);
                    self.number(token.into());
                }
                Input::Sampled { plan, seq } => {
                    self.number(SAMPLED);
                    self.number(plan);
                    self.number(seq);
                }
            }
        }
        self.number(row.from.into());
        self.number(row.blocks.len() as u64);
        row.blocks.for_each(|block| self.number(block.into()));
        self.number(row.samples.len() as u64);
        row.samples.for_each(|seq| self.number(seq));
        self.number(row.drafts.into());
    }

    /// Seven bits a byte, the lowest first.
    fn number(&mut self, number: u64) {
        let more = |shift: u32| (number >> shift) as u8 | 0x80;
        let last = |shift: u32| (number >> shift) as u8;
        // Most numbers are short, and added in one go.
        match number {
            0..=0x7f => self.0.push(last(0)),
            0x80..=0x3fff => self.0.extend_from_slice(&[more(0), last(7)]),
            0x4000..=0x1f_ffff => self.0.extend_from_slice(&[more(0), more(7), last(14)]),
            0x20_0000.. => {
                self.0.extend_from_slice(&[more(0), more(7), more(14)]);
                self.number(number >> 21);
            }
        }
    }
}

/// Adds the frame of a plan to `bytes`; `row` writes one row.
pub(crate) fn append<R>(
    bytes: &mut Vec<u8>,
    plan: &PlanParts<'_, R>,
    row: impl Fn(&R, &mut RowWriter<'_>),
) -> Result<(), FrameError> {
    Frame::append(bytes, |frame| {
        let mut head = RowWriter(frame.bytes());
        head.number(PLAN);
        head.number(plan.id);
        frame.add(plan.begin)?;
        frame.add(plan.copies)?;
        let mut rows = RowWriter(frame.bytes());
        rows.number(plan.rows.len() as u64);
        plan.rows.iter().for_each(|each| row(each, &mut rows));
        frame.add(plan.end)
    })
}

#[cfg(test)]
mod tests {
    use pagedd_core::Few;
    use proptest::prelude::*;

    use super::*;
    use crate::encode;
    use crate::worker::{Plan, Row, TableUpdate, ToWorker};

    fn write(row: &Row, to: &mut RowWriter<'_>) {
        let &Row { seq, start, ref inputs, ref table, ref samples, drafts } = row;
        let (inputs, blocks, samples) =
            (inputs.iter().copied(), table.blocks.iter().copied(), samples.iter().copied());
        to.write(RowParts { seq, start, inputs, from: table.from, blocks, samples, drafts });
    }

    fn input() -> impl Strategy<Value = Input> {
        prop_oneof![
            any::<u32>().prop_map(Input::Known),
            any::<(u64, u64)>().prop_map(|(plan, seq)| Input::Sampled { plan, seq }),
        ]
    }

    prop_compose! {
        fn row()(
            (seq, start, from, drafts) in any::<(u64, u32, u32, u32)>(),
            inputs in prop::collection::vec(input(), 0..4),
            blocks in prop::collection::vec(any::<u32>(), 0..4),
            samples in prop::collection::vec(any::<u64>(), 0..3),
        ) -> Row {
            let (inputs, samples) = (Few::from_vec(inputs), Few::from_vec(samples));
            Row { seq, start, inputs, table: TableUpdate { from, blocks }, samples, drafts }
        }
    }

    proptest! {
        #[test]
        fn a_plan_in_parts_has_the_bytes_of_a_plan(
            id in any::<u64>(),
            copies in prop::collection::vec(any::<(u32, u32, u32)>(), 0..3),
            rows in prop::collection::vec(row(), 0..5),
            end in prop::collection::vec(any::<u64>(), 0..3),
            begun in prop::collection::vec(any::<(u64, u32)>(), 0..3),
        ) {
            let sampling = pagedd_core::SamplingParams::GREEDY.into();
            let begin: Vec<_> = begun
                .into_iter()
                .map(|(seq, choice)| Begin { seq, choice, sampling, prompt: 7, tokens: vec![choice] })
                .collect();
            let copies: Vec<_> =
                copies.into_iter().map(|(from, to, tokens)| BlockCopy { from, to, tokens }).collect();
            let parts = PlanParts { id, begin: &begin, copies: &copies, rows: &rows, end: &end };
            let mut bytes = b"before".to_vec();
            append(&mut bytes, &parts, write).unwrap();
            let plan = Plan { id, begin: begin.clone(), copies: copies.clone(), rows: rows.clone(), end: end.clone() };
            prop_assert_eq!(&bytes[..6], b"before");
            prop_assert_eq!(&bytes[6..], encode(&ToWorker::Plan(plan)).unwrap());
        }
    }
}
