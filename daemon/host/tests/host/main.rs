//! Processes, fds and the keeper against the real kernel.
//!
//! Every test runs as the only thread of a process of its own: forking, signals and fd numbers belong to the whole process. The
//! same binary also plays the children, by role.
#![allow(clippy::unwrap_used)]

mod forking;
mod jailing;
mod keeping;
mod locking;
mod roles;
mod spawning;

use std::env;
use std::process::{Command, ExitCode};

/// Names of tests beside the functions, in the order they run.
macro_rules! tests {
    ($($module:ident { $($name:ident,)* })*) => {
        &[$($((concat!(stringify!($module), "::", stringify!($name)), $module::$name as fn()),)*)*]
    };
}

const TESTS: &[(&str, fn())] = tests! {
    spawning {
        a_child_finds_exactly_the_fds_it_was_given,
        fds_whose_numbers_are_swapped_arrive_swapped,
        children_started_at_once_by_many_threads_get_no_fd_of_one_another,
        a_child_has_exactly_the_environment_it_was_given,
        a_child_starts_with_default_signals_in_a_session_of_its_own,
        a_child_dumps_no_core_and_gains_no_privileges,
        a_program_that_cannot_run_is_named_and_leaves_no_process,
        mistakes_of_the_caller_are_named,
        a_child_that_lives_is_waited_for_in_vain_and_then_killed,
        an_exit_code_is_kept_after_the_child_is_reaped,
        a_child_has_the_user_it_was_given_and_no_capabilities,
        a_child_has_no_capability_or_those_to_change_its_user_and_keeps_them_over_exec,
        a_child_joins_its_cgroup_or_does_not_start,
    }
    forking {
        a_fork_keeps_what_it_is_told_to_and_nothing_else,
        a_fork_has_its_name_its_user_and_no_way_back,
        a_fork_that_cannot_be_confined_does_not_exist,
        a_process_with_threads_is_not_forked,
        ended_forks_are_reaped,
    }
    jailing {
        outside_of_the_jail_the_attacks_work,
        in_the_jail_every_attack_is_refused,
        in_the_jail_a_connection_is_served_and_threads_run,
        a_panic_or_an_abort_in_the_jail_ends_the_process,
        a_call_of_another_architecture_ends_the_process,
        a_fork_of_a_user_of_its_own_has_no_more_than_its_threads,
    }
    keeping {
        a_stored_fd_comes_back_by_name_after_a_kill,
        a_port_is_never_refused_while_the_daemon_is_dead,
        a_name_holds_one_fd_until_it_is_removed,
        messages_of_other_processes_and_garbage_are_ignored,
        a_clean_exit_ends_the_keeper,
        a_first_start_that_fails_is_not_repeated,
        a_final_exit_code_is_passed_on_and_others_are_restarted,
        a_missing_program_is_not_tried_again,
        a_signal_to_stop_is_passed_on,
        a_hangup_is_passed_on,
        a_hangup_before_the_daemon_is_ready_waits_until_it_is,
        a_daemon_that_is_ready_and_falls_silent_is_killed_and_followed,
        a_daemon_may_be_silent_as_long_as_it_is_not_ready,
        a_store_of_a_thousand_fds_survives_restarts,
        a_daemon_that_does_not_stop_is_killed,
        a_keeper_that_waits_to_restart_can_be_stopped,
        a_daemon_sees_the_end_of_its_keeper,
        the_environment_passes_except_what_was_meant_for_the_keeper,
    }
    locking {
        a_second_daemon_on_a_state_directory_is_told_who_holds_it,
        a_holder_that_is_about_to_end_is_waited_for,
        a_lock_ends_with_its_process,
        a_lock_that_a_dead_holders_child_still_has_is_waited_for,
        a_state_directory_that_does_not_exist_is_named,
        a_second_daemon_on_a_gpu_is_told_which_by_what_file_and_who_holds_it,
        the_lock_of_a_gpu_ends_with_its_process_and_no_child_has_it,
        the_lock_of_a_gpu_lies_where_it_can_and_never_behind_a_link,
        a_lock_file_of_another_user_is_locked_without_being_written,
    }
};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["role", role, ref rest @ ..] => roles::play(role, rest),
        ["alone", name] => {
            let (_, test) = TESTS.iter().find(|(known, _)| *known == name).unwrap();
            test();
            ExitCode::SUCCESS
        }
        ref words => run(words),
    }
}

/// Understands filters, `--exact` and `--list` as the usual harness does, and leaves its other options aside.
fn run(words: &[&str]) -> ExitCode {
    let exact = words.contains(&"--exact");
    if words.contains(&"--ignored") {
        return ExitCode::SUCCESS;
    }
    // `--format` alone has its value as a word of its own.
    let is_value = |at: usize| at > 0 && words[at - 1] == "--format";
    let filters: Vec<_> = (0..words.len())
        .filter(|at| !words[*at].starts_with('-') && !is_value(*at))
        .map(|at| words[at])
        .collect();
    let chosen = TESTS.iter().filter(|(name, _)| {
        filters.is_empty()
            || filters.iter().any(|filter| if exact { *name == *filter } else { name.contains(*filter) })
    });
    let mut failed = 0;
    for (name, _) in chosen {
        if words.contains(&"--list") {
            println!("{name}: test");
            continue;
        }
        let status = Command::new(roles::me()).args(["alone", name]).status().unwrap();
        println!("test {name} ... {}", if status.success() { "ok" } else { "FAILED" });
        failed += u8::from(!status.success());
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(101) }
}
