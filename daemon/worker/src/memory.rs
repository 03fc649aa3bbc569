//! How much memory there is, and how many KV blocks go into it.
//!
//! **Owns** the arithmetic from [`KvMemory`] to a number of blocks. **Never** allocates.

use std::fs;
use std::path::{Path, PathBuf};

use pagedd_wire::worker::{Device, Hello, KvMemory};

/// The KV arena cannot be made as asked.
#[derive(thiserror::Error, PartialEq, Debug)]
pub enum KvSizeError {
    /// Not even one block fits.
    #[error(
        "kv_memory of {wanted} bytes holds no block of {block_bytes} bytes ({block_size} tokens): give it at least that"
    )]
    NoBlock {
        /// What the setting comes to.
        wanted: u64,
        /// Bytes of a block.
        block_bytes: u64,
        /// Tokens of a block.
        block_size: u32,
    },
    /// More than there is.
    #[error("kv_memory of {wanted} bytes is more than the {available} bytes available: lower it")]
    TooLarge {
        /// What the setting comes to.
        wanted: u64,
        /// What there is.
        available: u64,
    },
    /// No percentage.
    #[error("kv_memory of {percent} %: it must lie above 0 and at or below 100")]
    BadPercent {
        /// What was asked for.
        percent: f32,
    },
}

/// A KV arena as asked for.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct KvRequest {
    /// The setting.
    pub memory: KvMemory,
    /// Tokens of a block.
    pub block_size: u32,
    /// Bytes of a block, all layers.
    pub block_bytes: u64,
    /// Most sequences in a plan.
    pub max_num_seqs: u32,
    /// Longest sequence, in tokens.
    pub max_model_len: u32,
    /// What `auto` takes of what is available, in per cent: a host has other things to do, a GPU has not.
    pub auto_percent: u64,
}

impl KvRequest {
    /// What `hello` asks for, of a model with sequences of up to `context` tokens and blocks of `block_bytes`.
    pub fn new(hello: &Hello, context: u32, block_bytes: u64) -> Self {
        Self {
            memory: hello.kv_memory,
            block_size: hello.block_size,
            block_bytes,
            max_num_seqs: hello.max_num_seqs,
            max_model_len: hello.max_model_len.map_or(context, |limit| limit.min(context)),
            auto_percent: Self::auto_percent_of(hello.device),
        }
    }

    /// What `auto` takes of what is available on a device, in per cent.
    pub fn auto_percent_of(device: Device) -> u64 {
        match device {
            Device::Cpu => 25,
            Device::Cuda { .. } => 90,
        }
    }

    /// Blocks that `max_num_seqs` sequences of full length need: more are of no use to `auto`.
    pub fn useful_blocks(&self) -> u32 {
        let each = u64::from(self.max_model_len.div_ceil(self.block_size));
        u32::try_from(each * u64::from(self.max_num_seqs)).unwrap_or(u32::MAX)
    }

    /// How many blocks the arena has, where `available` bytes are free for it.
    ///
    /// # Errors
    /// [`KvSizeError`] with the numbers.
    pub fn blocks(&self, available: u64) -> Result<u32, KvSizeError> {
        let (wanted, most) = match self.memory {
            KvMemory::Auto => {
                let part = u128::from(available) * u128::from(self.auto_percent) / 100;
                (u64::try_from(part).unwrap_or(available), self.useful_blocks())
            }
            KvMemory::Bytes(bytes) => (bytes, u32::MAX),
            KvMemory::Tokens(tokens) => {
                let blocks = tokens.div_ceil(u64::from(self.block_size));
                (blocks.saturating_mul(self.block_bytes), u32::MAX)
            }
            KvMemory::Percent(percent) => {
                if !(percent > 0.0 && percent <= 100.0) {
                    return Err(KvSizeError::BadPercent { percent });
                }
                ((available as f64 * f64::from(percent) / 100.0) as u64, u32::MAX)
            }
        };
        if wanted > available {
            return Err(KvSizeError::TooLarge { wanted, available });
        }
        let blocks = u32::try_from(wanted / self.block_bytes).unwrap_or(u32::MAX).min(most);
        if blocks == 0 {
            return Err(KvSizeError::NoBlock {
                wanted,
                block_bytes: self.block_bytes,
                block_size: self.block_size,
            });
        }
        Ok(blocks)
    }

    /// Whether an arena of `blocks` blocks, sized by an earlier worker from what was available then, still answers this
    /// request.
    pub fn accepts(&self, blocks: u32) -> bool {
        match self.memory {
            KvMemory::Auto => (1..=self.useful_blocks()).contains(&blocks),
            KvMemory::Percent(_) => blocks > 0,
            KvMemory::Bytes(_) | KvMemory::Tokens(_) => self.blocks(u64::MAX) == Ok(blocks),
        }
    }
}

/// Bytes that this process may still take: the system's `MemAvailable`, and no more than what its cgroups leave it.
///
/// `None` where the system does not say.
pub fn available() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let system = mem_available(&meminfo)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(cgroup_dirs(&groups).iter().filter_map(|dir| headroom(dir)).fold(system, u64::min))
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Directories of the memory controller that limit this process: its own cgroup and every ancestor, v2 and v1.
fn cgroup_dirs(groups: &str) -> Vec<PathBuf> {
    let mut dirs = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let root = match controllers {
            "" => "/sys/fs/cgroup",
            _ if controllers.split(',').any(|c| c == "memory") => "/sys/fs/cgroup/memory",
            _ => continue,
        };
        let own = Path::new(root).join(path.trim_start_matches('/'));
        dirs.extend(own.ancestors().take_while(|dir| dir.starts_with(root)).map(Path::to_path_buf));
    }
    dirs
}

/// Limit minus use of one cgroup; `None` without a limit. File pages that nobody touched lately give way, so they are not use.
fn headroom(dir: &Path) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(dir.join(file)).ok();
    let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
    let (limit, used) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?),
        None => (number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?),
    };
    let stat = read("memory.stat").unwrap_or_default();
    let entry = |name: &str| {
        let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line?.parse::<u64>().ok()
    };
    let idle = entry("total_inactive_file").or_else(|| entry("inactive_file")).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(idle)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn request(memory: KvMemory) -> KvRequest {
        KvRequest {
            memory,
            block_size: 16,
            block_bytes: MIB,
            max_num_seqs: 4,
            max_model_len: 100,
            auto_percent: 25,
        }
    }

    #[test]
    fn auto_takes_a_quarter_but_no_more_than_can_be_used() {
        assert_eq!(request(KvMemory::Auto).blocks(80 * MIB), Ok(20));
        assert_eq!(request(KvMemory::Auto).blocks(8000 * MIB), Ok(28));
    }

    #[test]
    fn bytes_tokens_and_per_cent_come_to_blocks() {
        assert_eq!(request(KvMemory::Bytes(3 * MIB + 5)).blocks(80 * MIB), Ok(3));
        assert_eq!(request(KvMemory::Tokens(33)).blocks(80 * MIB), Ok(3));
        assert_eq!(request(KvMemory::Percent(50.0)).blocks(80 * MIB), Ok(40));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers() {
        let error = request(KvMemory::Bytes(5)).blocks(80 * MIB).unwrap_err().to_string();
        assert!(
            error.starts_with("kv_memory of 5 bytes holds no block of 1048576 bytes (16 tokens)"),
            "{error}"
        );
        let error = request(KvMemory::Tokens(u64::MAX)).blocks(80 * MIB).unwrap_err().to_string();
        assert!(error.contains("more than the 83886080 bytes available"), "{error}");
        for percent in [0.0, -1.0, 101.0, f32::NAN] {
            let error = request(KvMemory::Percent(percent)).blocks(80 * MIB).unwrap_err();
            assert!(matches!(error, KvSizeError::BadPercent { .. }), "{error}");
        }
    }

    #[test]
    fn an_arena_sized_from_what_was_available_once_is_still_accepted() {
        assert!(request(KvMemory::Auto).accepts(20));
        assert!(!request(KvMemory::Auto).accepts(29));
        assert!(request(KvMemory::Percent(1.0)).accepts(7));
        assert!(request(KvMemory::Tokens(33)).accepts(3));
        assert!(!request(KvMemory::Tokens(33)).accepts(4));
        assert!(!request(KvMemory::Percent(1.0)).accepts(0));
    }

    #[test]
    fn every_ancestor_of_the_cgroup_counts_in_both_versions() {
        let dirs = cgroup_dirs("4:memory:/a/b\n1:cpu:/c\n0::/x/y\n");
        let dirs: Vec<_> = dirs.iter().map(|d| d.to_str().unwrap()).collect();
        assert_eq!(
            dirs,
            [
                "/sys/fs/cgroup/memory/a/b",
                "/sys/fs/cgroup/memory/a",
                "/sys/fs/cgroup/memory",
                "/sys/fs/cgroup/x/y",
                "/sys/fs/cgroup/x",
                "/sys/fs/cgroup",
            ]
        );
    }

    #[test]
    fn the_limit_of_a_cgroup_leaves_what_is_not_used() {
        let dir = std::env::temp_dir().join(format!("pagedd-headroom-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("memory.max"), "max\n").unwrap();
        fs::write(dir.join("memory.current"), "30\n").unwrap();
        assert_eq!(headroom(&dir), None);
        fs::write(dir.join("memory.max"), "100\n").unwrap();
        assert_eq!(headroom(&dir), Some(70));
        fs::write(dir.join("memory.stat"), "anon 5\ninactive_file 10\n").unwrap();
        assert_eq!(headroom(&dir), Some(80));
        fs::write(dir.join("memory.max"), "15\n").unwrap();
        assert_eq!(headroom(&dir), Some(0));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn this_host_says_how_much_memory_is_available() {
        assert!(available().unwrap() > MIB);
    }
}
