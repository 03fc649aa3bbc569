//! Which of a rendered text came from the client.

use std::collections::{BTreeMap, BTreeSet};

use super::{Sent, StoodIn};
use crate::tokenizer::Piece;

/// Characters by preference: a control token that has one cannot be written without it, and text seldom has it.
const SIGNS: [char; 4] = ['|', '｜', '_', '▁'];
/// Planes 15 and 16 of Unicode: no text has these by accident.
const PRIVATE: std::ops::RangeInclusive<u32> = 0xf_0000..=0x10_fffd;

/// What control tokens are made of.
pub(super) struct Taint {
    controls: Vec<String>,
    /// Every control token has at least one of these; straddling text and template breaks it too.
    signs: BTreeSet<char>,
    /// Private-use characters of the template and of control tokens: no stand-ins.
    reserved: BTreeSet<char>,
}

/// A stand-in for each sign.
struct StandIns {
    to: BTreeMap<char, char>,
    from: BTreeMap<char, char>,
}

impl Taint {
    pub(super) fn new(controls: &[String], template: &str) -> Self {
        let controls: Vec<String> = controls.iter().filter(|c| !c.is_empty()).cloned().collect();
        let mut signs = BTreeSet::new();
        for control in &controls {
            match SIGNS.into_iter().find(|&sign| control.contains(sign)) {
                Some(sign) => _ = signs.insert(sign),
                None => signs.extend(control.chars().next().into_iter().chain(control.chars().next_back())),
            }
        }
        let texts = controls.iter().map(String::as_str).chain([template]);
        let reserved = texts.flat_map(str::chars).filter(|&c| PRIVATE.contains(&u32::from(c))).collect();
        Self { controls, signs, reserved }
    }

    /// `plain` in pieces. `render` renders what was sent with stand-ins; `None` where it fails.
    pub(super) fn trace(
        &self,
        plain: &str,
        sent: &Sent<'_>,
        render: impl Fn(&StoodIn) -> Option<String>,
    ) -> Vec<Piece> {
        let mut suspicious = false;
        let mut used = self.reserved.clone();
        sent.strings(&mut |text| {
            for c in text.chars() {
                suspicious |= self.signs.contains(&c);
                if PRIVATE.contains(&u32::from(c)) {
                    used.insert(c);
                }
            }
        });
        if !suspicious {
            return vec![Piece::Trusted(plain.to_owned())];
        }
        if let Some(stand_ins) = StandIns::new(&self.alphabet(), &used) {
            let everywhere = |text: &str| stand_ins.replace(text, |c| self.signs.contains(&c));
            let in_parts = |text: &str| self.replace_parts(text, &stand_ins);
            let ways: [&dyn Fn(&str) -> String; 2] = [&everywhere, &in_parts];
            for way in ways {
                if let Some(traced) = render(&sent.map(way))
                    && let Some(pieces) = stand_ins.pieces(&traced, plain)
                {
                    return pieces;
                }
            }
        }
        self.without_sent_controls(plain, sent)
    }

    /// Every character of every control token.
    fn alphabet(&self) -> BTreeSet<char> {
        self.controls.iter().flat_map(|control| control.chars()).collect()
    }

    /// Stand-ins where the first or last two characters of a control token occur, or all of a shorter one.
    fn replace_parts(&self, text: &str, stand_ins: &StandIns) -> String {
        let mut tainted = vec![false; text.len()];
        for part in self.parts() {
            for (at, _) in text.match_indices(part) {
                tainted[at..at + part.len()].fill(true);
            }
        }
        let chars = text.char_indices().map(|(at, c)| if tainted[at] { stand_ins.of(c) } else { c });
        chars.collect()
    }

    /// The first two and last two characters of each control token.
    fn parts(&self) -> BTreeSet<&str> {
        let ends = |control: &'_ str| {
            let second = control.char_indices().nth(2).map_or(control.len(), |(at, _)| at);
            let last = control.char_indices().rev().nth(1).map_or(0, |(at, _)| at);
            (second, last)
        };
        self.controls
            .iter()
            .flat_map(|control| {
                let (second, last) = ends(control);
                [&control[..second], &control[last..]]
            })
            .collect()
    }

    /// Control tokens of which a part was sent are plain text wherever they stand.
    fn without_sent_controls(&self, plain: &str, sent: &Sent<'_>) -> Vec<Piece> {
        let mut sent_parts: BTreeSet<&str> = BTreeSet::new();
        let parts = self.parts();
        sent.strings(&mut |text| sent_parts.extend(parts.iter().filter(|part| text.contains(**part))));
        let mut user = vec![false; plain.len()];
        for control in &self.controls {
            if sent_parts.iter().any(|&part| control.starts_with(part) || control.ends_with(part)) {
                for (at, _) in plain.match_indices(control.as_str()) {
                    user[at..at + control.len()].fill(true);
                }
            }
        }
        into_pieces(plain.char_indices().map(|(at, c)| (c, user[at])))
    }
}

impl StandIns {
    /// `None` where the client's text leaves no private-use characters free.
    fn new(alphabet: &BTreeSet<char>, used: &BTreeSet<char>) -> Option<Self> {
        let mut free = PRIVATE.filter_map(char::from_u32).filter(|c| !used.contains(c));
        let mut stand_ins = Self { to: BTreeMap::new(), from: BTreeMap::new() };
        for &c in alphabet {
            let stand_in = free.next()?;
            stand_ins.to.insert(c, stand_in);
            stand_ins.from.insert(stand_in, c);
        }
        Some(stand_ins)
    }

    fn of(&self, c: char) -> char {
        self.to.get(&c).copied().unwrap_or(c)
    }

    fn replace(&self, text: &str, which: impl Fn(char) -> bool) -> String {
        text.chars().map(|c| if which(c) { self.of(c) } else { c }).collect()
    }

    /// The pieces of a rendering with stand-ins, if it is `plain` apart from them.
    fn pieces(&self, traced: &str, plain: &str) -> Option<Vec<Piece>> {
        let mut rest = plain.chars();
        for c in traced.chars() {
            let original = self.from.get(&c).copied().unwrap_or(c);
            if rest.next() != Some(original) {
                return None;
            }
        }
        if rest.next().is_some() {
            return None;
        }
        Some(into_pieces(traced.chars().map(|c| match self.from.get(&c) {
            Some(&original) => (original, true),
            None => (c, false),
        })))
    }
}

/// Runs of characters of one origin.
fn into_pieces(chars: impl Iterator<Item = (char, bool)>) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for (c, from_user) in chars {
        match (pieces.last_mut(), from_user) {
            (Some(Piece::User(text)), true) | (Some(Piece::Trusted(text)), false) => text.push(c),
            (_, true) => pieces.push(Piece::User(c.into())),
            (_, false) => pieces.push(Piece::Trusted(c.into())),
        }
    }
    pieces
}
