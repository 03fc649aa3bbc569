//! One body, compiled for every set of vectors.

/// Defines `$name(vectors, ...)`: `$body(...)`, which must be `#[inline(always)]`, compiled for each [`Vectors`](super::isa::Vectors).
///
/// The body may only use operations that are rounded once each, in one order: then every set gives the same bits. `vectors` must come from
/// a usable set.
macro_rules! versions {
    ($(#[$meta:meta])* $vis:vis $name:ident = $body:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)?) => {
        $(#[$meta])*
        $vis fn $name(vectors: $crate::cpu::isa::Vectors, $($arg: $ty),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $ty),*) $(-> $out)? {
                $body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($arg: $ty),*) $(-> $out)? {
                $body($($arg),*)
            }
            match vectors {
                $crate::cpu::isa::Vectors::Portable => $body($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `vectors` are those of a usable set: this processor has AVX2.
                $crate::cpu::isa::Vectors::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `vectors` are those of a usable set: this processor has AVX-512 F, BW, DQ and VL.
                $crate::cpu::isa::Vectors::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(not(target_arch = "x86_64"))]
                $crate::cpu::isa::Vectors::Avx2 | $crate::cpu::isa::Vectors::Avx512 => $body($($arg),*),
            }
        }
    };
}
pub(crate) use versions;
