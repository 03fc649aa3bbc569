//! Sequences by id.
//!
//! **Owns** them, in the order of age. **Never** knows what they are about.
//!
//! Every row of a step looks its sequence up some ten times. Ids are given out one after the other, so that they lie in pages of as many
//! as live together: a look-up is one in a map of few pages, and an index.

use std::collections::BTreeMap;

use pagedd_core::SequenceId;

use crate::sequence::Sequence;

/// Ids of a page.
const PAGE: u64 = 64;

/// Sequences, oldest first.
#[derive(Debug, Default)]
pub(crate) struct SequenceTable {
    /// By id divided by [`PAGE`]; none is empty.
    pages: BTreeMap<u64, Page>,
}

#[derive(Debug)]
struct Page {
    slots: Box<[Option<Box<Sequence>>]>,
    used: u64,
}

/// Page and place of an id.
fn place(id: SequenceId) -> (u64, usize) {
    (id.0 / PAGE, (id.0 % PAGE) as usize)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "it is asked as the maps beside it are")]
impl SequenceTable {
    pub fn get(&self, id: &SequenceId) -> Option<&Sequence> {
        let (page, slot) = place(*id);
        self.pages.get(&page)?.slots[slot].as_deref()
    }

    pub fn get_mut(&mut self, id: &SequenceId) -> Option<&mut Sequence> {
        let (page, slot) = place(*id);
        self.pages.get_mut(&page)?.slots[slot].as_deref_mut()
    }

    /// A new one: nobody has its id.
    pub fn insert(&mut self, id: SequenceId, sequence: Sequence) {
        let (page, slot) = place(id);
        let none = || Page { slots: (0..PAGE).map(|_| None).collect(), used: 0 };
        let page = self.pages.entry(page).or_insert_with(none);
        debug_assert!(page.slots[slot].is_none(), "{id} is there already");
        page.slots[slot] = Some(Box::new(sequence));
        page.used += 1;
    }

    pub fn remove(&mut self, id: &SequenceId) {
        let (number, slot) = place(*id);
        if let Some(page) = self.pages.get_mut(&number)
            && page.slots[slot].take().is_some()
        {
            page.used -= 1;
            if page.used == 0 {
                self.pages.remove(&number);
            }
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (SequenceId, &Sequence)> {
        self.pages.iter().flat_map(|(number, page)| {
            let ids = (number * PAGE..).map(SequenceId);
            ids.zip(&page.slots).filter_map(|(id, slot)| Some((id, slot.as_deref()?)))
        })
    }

    pub fn values(&self) -> impl Iterator<Item = &Sequence> {
        self.iter().map(|(_, sequence)| sequence)
    }

    /// All of them; none are left.
    pub fn take(&mut self) -> impl Iterator<Item = Sequence> + use<> {
        let pages = std::mem::take(&mut self.pages);
        pages.into_values().flat_map(|page| page.slots.into_iter().flatten().map(|sequence| *sequence))
    }
}
