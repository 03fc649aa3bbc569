//! Exit codes of the daemon, in the numbers of `sysexits.h`.
//!
//! A start that ends with one of [`FINAL`] would end so again: neither the keeper nor the systemd unit repeats it.

/// The command line was wrong.
pub const USAGE: u8 = 64;
/// A port that the configuration or a tenant names, or a GPU that the configuration names, is in use.
pub const IN_USE: u8 = 69;
/// The host refused something that no configuration decides: a socket, a process.
pub const OS: u8 = 71;
/// The state directory cannot be used, or another daemon uses it.
pub const STATE_DIR: u8 = 73;
/// The configuration is wrong.
pub const CONFIG: u8 = 78;

/// Codes after which a restart is pointless. 2 is what the command line parser itself exits with.
pub const FINAL: [u8; 6] = [2, USAGE, IN_USE, OS, STATE_DIR, CONFIG];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systemd_unit_repeats_no_start_that_the_keeper_would_not() {
        let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../systemd/pagedd.service");
        let unit = std::fs::read_to_string(unit).unwrap();
        let lines = unit.lines().filter_map(|line| line.strip_prefix("RestartPreventExitStatus="));
        let codes = lines.flat_map(|line| line.split(' ')).map(|code| code.parse().unwrap());
        // Those from 200 up are systemd's own.
        let ours: Vec<u8> = codes.filter(|code| *code < 200).collect();
        assert_eq!(ours, FINAL);
    }
}
