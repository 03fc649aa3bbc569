//! Which instructions the kernels use.

use std::fmt;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use std::sync::OnceLock;

/// An instruction set that kernels are written for.
///
/// Every kernel asks [`Isa::usable`] before it runs special instructions, so a value that this processor does not have is safe to
/// pass: it runs as the best that is there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Isa {
    /// Plain Rust.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-VNNI (256 bits), and everything of [`Isa::Avx2`].
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI, and everything of [`Isa::Avx2`].
    Avx512Vnni,
    /// AMX with 8-bit integers, and everything of [`Isa::Avx512Vnni`].
    Amx,
}

/// The vectors of single precision that come with an instruction set: what kernels without integer products are written for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Vectors {
    /// Plain Rust.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, and everything of [`Vectors::Avx2`].
    Avx512,
}

impl Isa {
    /// Every set, plain first.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::AvxVnni, Self::Avx512Vnni, Self::Amx];

    /// The best set of this processor.
    #[must_use]
    pub fn detect() -> Self {
        Self::Amx.usable()
    }

    /// This set, or the best below it where this processor lacks it.
    #[must_use]
    pub fn usable(self) -> Self {
        let has = |isa| match isa {
            Self::Portable => true,
            Self::Avx2 => has_avx2(),
            Self::AvxVnni => has_avx_vnni(),
            Self::Avx512Vnni => has_avx512_vnni(),
            Self::Amx => has_amx(),
        };
        Self::ALL.into_iter().filter(|&isa| isa <= self && has(isa)).max().unwrap_or(Self::Portable)
    }

    /// The vectors of this set, or of the best below it where this processor lacks it.
    pub(crate) fn vectors(self) -> Vectors {
        match self.usable() {
            Self::Portable => Vectors::Portable,
            Self::Avx2 | Self::AvxVnni => Vectors::Avx2,
            Self::Avx512Vnni | Self::Amx => Vectors::Avx512,
        }
    }

    /// The name shown in logs and status.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avx-vnni",
            Self::Avx512Vnni => "avx512-vnni",
            Self::Amx => "amx",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx_vnni() -> bool {
    has_avx2() && is_x86_feature_detected!("avxvnni")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512_vnni() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx_vnni() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512_vnni() -> bool {
    false
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn has_amx() -> bool {
    false
}

/// Whether the processor has AMX tiles with 8-bit integers, the system saves them, and this process has its leave to use them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_amx() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| {
        has_avx512_vnni() && amx::processor_has_tiles() && amx::system_saves_tiles() && amx::request()
    })
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    #![allow(unsafe_code)]

    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

    /// Leaf 7: `amx-tile` and `amx-int8`.
    pub(super) fn processor_has_tiles() -> bool {
        let bits = 1 << 24 | 1 << 25;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & bits == bits
    }

    /// The parts of the saved state (`XCR0`) that are tiles. Called where AVX-512 was found, which needs the same instruction.
    pub(super) fn system_saves_tiles() -> bool {
        let bits = 1 << 17 | 1 << 18;
        // SAFETY: AVX-512 was found, so the system has turned `xgetbv` on; register 0 always exists.
        let saved = unsafe { xcr0() };
        saved & bits == bits
    }

    /// # Safety
    /// The processor and the system have `xsave`.
    #[target_feature(enable = "xsave")]
    unsafe fn xcr0() -> u64 {
        // SAFETY: this function's contract.
        unsafe { _xgetbv(0) }
    }

    /// Asks Linux for leave to use tile data: `arch_prctl(ARCH_REQ_XCOMP_PERM, 18)`, for this process and all its threads.
    pub(super) fn request() -> bool {
        const SYS_ARCH_PRCTL: usize = 158;
        const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
        const TILE_DATA: usize = 18;
        let result: isize;
        // SAFETY: the call reads two numbers and touches no memory of this process; an unknown one is an error, which is handled.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") SYS_ARCH_PRCTL => result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") TILE_DATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usable_set_is_never_better_than_the_one_asked_for() {
        for isa in Isa::ALL {
            assert!(isa.usable() <= isa, "{isa} became {}", isa.usable());
            assert!(isa.usable() <= Isa::detect());
            assert_eq!(isa.usable().usable(), isa.usable());
        }
    }
}
