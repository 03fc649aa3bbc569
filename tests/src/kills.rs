//! Who is killed when: a schedule drawn from a seed, and the count of what was hit.
//!
//! **Owns** the cells of phase x victim. **Never** kills anybody.

use std::collections::BTreeMap;
use std::fmt;

use crate::random::Random;

/// Who is killed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Victim {
    /// The model's worker.
    Worker,
    /// A tenant's gateway.
    Gateway,
    /// The daemon.
    Daemon,
}

impl Victim {
    /// All.
    pub const ALL: [Self; 3] = [Self::Worker, Self::Gateway, Self::Daemon];
}

/// How far some request has come when a part is killed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    /// It was sent, and no head has come.
    Admitting,
    /// Its head has come, and no token of a long prompt's answer.
    Prefill,
    /// Some of its tokens have come, and most not.
    Decode,
    /// Another part was killed, and it has come no further since.
    Recovery,
    /// Its last tokens are coming.
    End,
}

impl Phase {
    /// All.
    pub const ALL: [Self; 5] = [Self::Admitting, Self::Prefill, Self::Decode, Self::Recovery, Self::End];
}

/// Which phase and which victim.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Cell {
    /// When.
    pub phase: Phase,
    /// Who.
    pub victim: Victim,
}

/// `count` cells, of which any 15 in a row from a multiple of 15 on are all there are, in an order of their own.
pub fn schedule(random: &mut Random, victims: &[Victim], count: usize) -> Vec<Cell> {
    let all: Vec<Cell> = Phase::ALL
        .into_iter()
        .flat_map(|phase| victims.iter().map(move |&victim| Cell { phase, victim }))
        .collect();
    let mut cells = Vec::new();
    while cells.len() < count {
        let mut round = all.clone();
        for i in (1..round.len()).rev() {
            round.swap(i, random.below(i as u64 + 1) as usize);
        }
        cells.extend(round);
    }
    cells.truncate(count);
    cells
}

/// How often each cell was hit.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Hits(BTreeMap<Cell, u32>);

impl Hits {
    /// Counts one.
    pub fn add(&mut self, cell: Cell) {
        *self.0.entry(cell).or_default() += 1;
    }

    /// How often.
    pub fn of(&self, cell: Cell) -> u32 {
        self.0.get(&cell).copied().unwrap_or(0)
    }

    /// All together.
    pub fn total(&self) -> u32 {
        self.0.values().sum()
    }
}

impl fmt::Display for Hits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<10}", "killed")?;
        for victim in Victim::ALL {
            write!(f, "{:>9}", format!("{victim:?}").to_lowercase())?;
        }
        for phase in Phase::ALL {
            write!(f, "\n{:<10}", format!("{phase:?}").to_lowercase())?;
            for victim in Victim::ALL {
                write!(f, "{:>9}", self.of(Cell { phase, victim }))?;
            }
        }
        write!(f, "\n{:<10}{:>9}", "together", self.total())
    }
}
