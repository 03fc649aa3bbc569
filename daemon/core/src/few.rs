//! A list that has one element as a rule.

use std::fmt;
use std::ops::{Deref, DerefMut};

/// A list. A single element lies in the value itself and takes no memory of its own: steps have a row for each of hundreds of sequences,
/// and nearly all of them one input and one draw.
#[derive(Clone)]
pub enum Few<T> {
    /// One.
    One(T),
    /// Any number.
    Many(Vec<T>),
}

impl<T> Few<T> {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Self::Many(Vec::new())
    }

    /// Appends one.
    pub fn push(&mut self, element: T) {
        self.extend([element]);
    }
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }
}

impl<T> DerefMut for Few<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::One(one) => std::slice::from_mut(one),
            Self::Many(many) => many,
        }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        let mut few = Self::new();
        few.extend(elements);
        few
    }
}

impl<T> Extend<T> for Few<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, elements: I) {
        let mut elements = elements.into_iter();
        let Some(next) = elements.next() else { return };
        *self = match std::mem::take(self) {
            Self::Many(none) if none.is_empty() => Self::One(next),
            Self::One(one) => Self::Many(vec![one, next]),
            Self::Many(mut many) => {
                many.push(next);
                Self::Many(many)
            }
        };
        // One more makes a list of it.
        if let Some(next) = elements.next() {
            let mut many = match std::mem::take(self) {
                Self::One(one) => vec![one],
                Self::Many(many) => many,
            };
            many.push(next);
            many.extend(elements);
            *self = Self::Many(many);
        }
    }
}

impl<T> From<Vec<T>> for Few<T> {
    fn from(many: Vec<T>) -> Self {
        Self::Many(many)
    }
}

impl<T, const N: usize> From<[T; N]> for Few<T> {
    fn from(elements: [T; N]) -> Self {
        elements.into_iter().collect()
    }
}

impl<'a, T> IntoIterator for &'a Few<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a, T> IntoIterator for &'a mut Few<T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl<T: PartialEq> PartialEq for Few<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for Few<T> {}

impl<T: PartialEq, const N: usize> PartialEq<[T; N]> for Few<T> {
    fn eq(&self, other: &[T; N]) -> bool {
        **self == *other
    }
}

impl<T: fmt::Debug> fmt::Debug for Few<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_list_that_was_put_in_however_it_was() {
        for count in 0..5_u32 {
            let all: Vec<u32> = (0..count).collect();
            for first in 0..=all.len() {
                let mut few: Few<u32> = all[..first].iter().copied().collect();
                few.extend(all[first..].iter().copied());
                assert_eq!(few, Few::from(all.clone()));
                assert_eq!(matches!(few, Few::One(_)), count == 1);
                few.push(9);
                few.iter_mut().for_each(|element| *element += 1);
                assert_eq!(few.iter().sum::<u32>(), all.iter().map(|element| element + 1).sum::<u32>() + 10);
            }
        }
        assert_eq!(Few::from([7]), [7]);
    }
}
