//! One slice, written by several threads in parts that do not overlap.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

/// A slice from which threads take parts.
///
/// Having one tells you that nobody else reads or writes the slice while it lives. It does not tell you that the parts taken are
/// disjoint: that is the caller's promise in [`Disjoint::part`].
pub(crate) struct Disjoint<'a, T> {
    base: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: the value stands for a `&mut [T]`; sending parts of it to other threads is what `T: Send` allows.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: a shared `Disjoint` gives out only parts that `part`'s caller promises not to overlap, so no `T` is ever shared.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { base: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The part `range`.
    ///
    /// # Panics
    /// Where `range` is not inside the slice.
    ///
    /// # Safety
    /// No element of `range` may be in another part that is alive.
    #[allow(clippy::mut_from_ref)] // the point of the type; see the safety section
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: `range.start <= len` by the assertion, so the pointer stays inside the slice or one past it.
        let first = unsafe { self.base.add(range.start) };
        // SAFETY: `[first, first + range.len())` is inside the borrowed slice by the assertion; nobody else holds these
        // elements by this function's contract, and the borrow of `self` ends before the slice's own.
        unsafe { std::slice::from_raw_parts_mut(first, range.end - range.start) }
    }
}
