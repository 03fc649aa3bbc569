//! Memory that other processes can map. Within one process here: a second mapping at other addresses is what another process has.

use std::os::fd::{AsFd as _, BorrowedFd};

use half::bf16;

use super::{Bench, Extent, Found};
use crate::cuda::{Buffer, CudaError, SharedBuffer, Stream, View, fill_normal};

pub(super) fn check(bench: &mut Bench, extent: Extent) -> Result<(), CudaError> {
    // No multiple of what the driver gives.
    let bytes = match extent {
        Extent::Full => (70 << 20) + 4112,
        Extent::Minimal => (3 << 20) + 4112,
    };
    let device = bench.stream.device().clone();
    let mut want = Buffer::<bf16>::zeroed(&bench.stream, bytes / 2)?;
    fill_normal(&bench.stream, 13, 1.0, &mut want.all_mut())?;

    let mut first = SharedBuffer::create(&device, bytes)?;
    fill_normal::<bf16>(&bench.stream, 13, 1.0, &mut first.all_mut().cast()?)?;
    let fd = first.export()?;
    let second = SharedBuffer::import(&device, fd.as_fd(), bytes)?;
    let apart = usize::from(first.all().address() == second.all().address());
    bench.report("shared memory", "at other addresses".to_owned(), Found::Different { count: apart, of: 1 });
    compare(bench, "mapped twice", second.all(), want.all())?;
    drop(first);
    compare(bench, "its maker gone", second.all(), want.all())?;
    drop(second);
    let mut third = SharedBuffer::import(&device, fd.as_fd(), bytes)?;
    compare(bench, "nobody but the descriptor left", third.all(), want.all())?;
    third.all_mut().fill_bytes(&bench.stream, 0xa5)?;
    want.all_mut().fill_bytes(&bench.stream, 0xa5)?;
    let fourth = SharedBuffer::import(&device, third.export()?.as_fd(), bytes)?;
    compare(bench, "exported by who imported it", fourth.all(), want.all())?;

    for (case, bytes) in
        [("half", bytes / 2), ("a little less", bytes - (2 << 20)), ("a little more", bytes + (2 << 20))]
    {
        refused(bench, case, fd.as_fd(), bytes);
    }
    let file = rustix::fs::memfd_create("no-gpu-memory", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(|error| CudaError::Device { doing: "making a memfd", code: error.to_string() })?;
    refused(bench, "a memfd", file.as_fd(), bytes);
    // Refusals leave nothing behind that makes the next import fail.
    let fifth = SharedBuffer::import(&device, fd.as_fd(), bytes)?;
    compare(bench, "after refusals", fifth.all(), want.all())
}

fn compare(bench: &mut Bench, case: &str, got: View<'_, u8>, want: View<'_, bf16>) -> Result<(), CudaError> {
    let bits = |stream: &Stream, view: View<'_, bf16>| -> Result<Vec<u16>, CudaError> {
        Ok(view.to_vec(stream)?.into_iter().map(bf16::to_bits).collect())
    };
    let (got, want) = (bits(&bench.stream, got.cast()?)?, bits(&bench.stream, want)?);
    let count = got.iter().zip(&want).filter(|(got, want)| got != want).count();
    bench.report("shared memory", case.to_owned(), Found::Different { count, of: want.len() });
    Ok(())
}

/// `fd` must not be taken for `bytes` bytes of shared memory.
fn refused(bench: &mut Bench, case: &str, fd: BorrowedFd<'_>, bytes: usize) {
    let answer = SharedBuffer::import(bench.stream.device(), fd, bytes);
    let count = usize::from(!matches!(answer, Err(CudaError::Foreign { .. })));
    bench.report("shared memory", format!("{case} refused"), Found::Different { count, of: 1 });
}
