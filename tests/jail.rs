//! A gateway that was taken over reaches nothing of anyone else's: by system calls from inside it, nor by what it says to the daemon.

mod tiny;

use std::collections::BTreeSet;
use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::thread;
use std::time::Duration;

use nix::unistd::geteuid;
use pagedd_host::attack::{self, Targets};
use pagedd_tests::daemon::{Daemon, Site, Tenant, binary};
use pagedd_tests::process::Process;
use pagedd_tests::wait;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_mins(1);

/// The process of a name below the daemon.
#[track_caller]
fn process(daemon: &Daemon, name: &str) -> Process {
    let processes = daemon.processes();
    let found = processes.iter().find(|process| process.name == name);
    found.unwrap_or_else(|| panic!("no {name} among {processes:#?}")).clone()
}

fn field(pid: u32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {status}")).trim().to_owned()
}

/// An address that can be read in a process: the beginning of its program.
fn address(pid: u32) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
    let first = maps.split('-').next().expect("a mapping");
    u64::from_str_radix(first, 16).expect("an address")
}

/// What there is of others, seen from `tenant`.
fn targets(daemon: &Daemon, tenant: &Tenant, other: &Tenant, name: &str) -> Targets {
    let site = daemon.site();
    let path = |file: &str| site.state().join(file).display().to_string();
    let processes =
        daemon.processes().into_iter().filter(|process| process.name != format!("gw:{}", tenant.name));
    let processes: Vec<(u32, u64)> = processes.map(|process| (process.pid, address(process.pid))).collect();
    // Keeper, daemon, worker, template, the other gateway.
    assert!(processes.len() >= 5, "{processes:?}");
    Targets {
        files: vec![
            path("control.db"),
            path("journal.db"),
            path(""),
            site.config().display().to_string(),
            "/etc/shadow".to_owned(),
        ],
        sockets: vec![site.socket().display().to_string()],
        names: vec![name.to_owned()],
        ports: vec![other.port, tenant.port],
        processes,
    }
}

#[test]
fn from_inside_a_gateway_nothing_of_another_tenant_the_daemon_or_the_host_is_reachable() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let daemon = Site::new(&tiny::yaml(folder.path())).start();
    let [acme, globex] =
        ["acme", "globex"].map(|name| daemon.add_tenant_of(tiny::MIX.model, name, "10%", "50%"));
    let name = format!("pagedd-test-{}", std::process::id());
    let _named =
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).expect("a name")).expect("bound");
    let targets = targets(&daemon, &acme, &globex, &name);
    let Targets { files, sockets, names, ports, processes } = targets.clone();
    let body =
        json!({"files": files, "sockets": sockets, "names": names, "ports": ports, "processes": processes});

    let inside = acme.http.post("/attacks", &body).ok();
    let inside = inside.as_array().expect("what was tried");
    let through: Vec<&Value> = inside.iter().filter(|attempt| attempt["refused"] != true).collect();
    println!("{} attacks from inside, {} not refused", inside.len(), through.len());
    assert!(inside.len() > 100 && through.is_empty(), "not refused: {through:#?}");

    // The same, from outside of it: an attack that never works would show nothing.
    let outside = thread::spawn(move || attack::run(&targets)).join().expect("the attacks");
    assert_eq!(outside.len(), inside.len());
    let worked = outside.iter().filter(|attempt| attempt.errno.is_none()).count();
    println!("the same from outside: {worked} worked");
    if geteuid().is_root() {
        let vain: Vec<String> =
            outside.iter().filter(|a| a.errno.is_some()).map(ToString::to_string).collect();
        assert!(worked * 4 > outside.len() * 3, "{worked} of {} worked; in vain: {vain:#?}", outside.len());
        for begins in [
            "open /",
            "connect /",
            "connect port",
            "connect abstract",
            "read memory",
            "signal",
            "take an fd",
            "trace",
            "set a limit",
        ] {
            let mut all = outside.iter().filter(|attempt| attempt.what.starts_with(begins));
            assert!(all.any(|attempt| attempt.errno.is_none()), "{begins}: in vain: {vain:#?}");
        }
    }

    for tenant in [&acme, &globex] {
        let body = json!({"model": tiny::MIX.model, "prompt": "hello", "max_tokens": 4});
        assert_eq!(tenant.http.post("/v1/completions", &body).status, 200, "{}", tenant.name);
    }
    daemon.stop();
}

#[test]
fn a_gateway_has_the_fds_it_needs_a_user_of_its_own_and_every_wall_that_the_status_tells_of() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let daemon = Site::new(&tiny::yaml(folder.path())).start();
    daemon.add_tenant_of(tiny::MIX.model, "acme", "10%", "50%");
    daemon.add_tenant_of(tiny::MIX.model, "globex", "10%", "50%");
    let [acme, globex] = ["gw:acme", "gw:globex"].map(|name| process(&daemon, name));
    for gateway in [&acme, &globex] {
        assert_eq!(field(gateway.pid, "NoNewPrivs"), "1");
        assert_eq!(field(gateway.pid, "Seccomp"), "2");
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert_eq!(field(gateway.pid, set), "0000000000000000", "{set}");
        }
        let links = || -> Vec<String> {
            let entries = fs::read_dir(format!("/proc/{}/fd", gateway.pid)).expect("it runs");
            let links = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
            links.map(|link| link.display().to_string()).collect()
        };
        let log = daemon.site().file("log").display().to_string();
        let known = |link: &String| {
            [log.as_str(), "/dev/null", "anon_inode:[eventpoll]", "anon_inode:[eventfd]"]
                .contains(&link.as_str())
        };
        // The listener, the daemon, and the two ends of the runtime's own pair, once the connections of the test's own questions are closed.
        wait::until("no connection is open", LIMIT, || {
            let sockets: BTreeSet<String> =
                links().into_iter().filter(|link| link.starts_with("socket:")).collect();
            sockets.len() == 4
        });
        let others: Vec<String> = links().into_iter().filter(|link| !known(link)).collect();
        assert!(others.iter().all(|link| link.starts_with("socket:")), "{others:#?}");
    }
    let status = daemon.status();
    println!("sandbox: {}", status["sandbox"]);
    if geteuid().is_root() {
        let users = [&acme, &globex].map(|gateway| field(gateway.pid, "Uid"));
        assert!(users[0] != users[1] && users.iter().all(|user| !user.starts_with("0\t")), "{users:?}");
        assert_eq!(field(acme.pid, "Groups"), "");
        let missing = &status["sandbox"]["missing"];
        assert!(!missing.to_string().contains("own_user"), "{missing}");
    }
    // Who reads the model has no capability, who forks gateways those to change its user alone.
    for model in daemon.processes().iter().filter(|process| process.name.starts_with("pagedd-w")) {
        assert_eq!(field(model.pid, "CapEff"), "0000000000000000");
    }
    for template in daemon.processes().iter().filter(|process| process.name.starts_with("pagedd-g")) {
        let own = if geteuid().is_root() { "00000000000000c0" } else { "0000000000000000" };
        assert_eq!(field(template.pid, "CapEff"), own);
        assert_eq!(field(template.pid, "CapPrm"), own);
    }
    daemon.stop();
}

#[test]
fn a_forged_frame_names_no_other_tenants_request_and_a_broken_one_ends_its_connection_alone() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let site = Site::new(&tiny::yaml(folder.path())).with_own_programs();
    site.replace_program("pagedd-gateway", &binary("examples/forger"));
    let said = |site: &Site, name: &str| fs::read_to_string(site.file("bin").join(name)).unwrap_or_default();
    let daemon = site.start();
    for name in ["globex", "acme"] {
        daemon.add_unready_tenant(tiny::MIX.model, name, "10%", "50%");
    }
    wait::until("everything was tried", LIMIT, || said(daemon.site(), "report").lines().count() == 5);
    assert_eq!(
        said(daemon.site(), "report"),
        "a frame before the hello: closed\n\
         another protocol: closed\n\
         a frame of 4 GiB: closed\n\
         a frame of no kind: closed\n\
         5 not found, the other's key refused; its own is cancelled: true; the other's runs: true\n"
    );
    wait::until("the other tenant's request goes on", LIMIT, || !said(daemon.site(), "ended").is_empty());
    assert_eq!(said(daemon.site(), "ended"), "it goes on");
    daemon.stop();
}

#[test]
fn a_daemon_that_is_not_root_gives_users_with_four_capabilities_and_none_without() {
    if !geteuid().is_root() {
        // Nobody else can start one with capabilities.
        return;
    }
    let folder = tempfile::tempdir().expect("a folder for the model");
    fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("all may read it");
    let yaml = tiny::yaml(folder.path());
    for capabilities in ["setuid,setgid,kill,net_bind_service", ""] {
        let daemon = Site::new(&yaml).with_own_programs().with_user(60_900, capabilities).start();
        let acme = daemon.add_tenant_of(tiny::MIX.model, "acme", "10%", "50%");
        let gateway = process(&daemon, "gw:acme");
        let own = capabilities.is_empty();
        assert_eq!(field(gateway.pid, "Uid").starts_with("60900\t"), own, "{capabilities}");
        assert_eq!(field(gateway.pid, "CapEff"), "0000000000000000");
        assert_eq!(daemon.status()["sandbox"].to_string().contains("own_user"), own);
        let warned = daemon.site().log_text().contains("gateways run as the daemon's own user");
        assert_eq!(warned, own, "{}", daemon.site().log_text());
        // It can be ended, and is forked anew.
        let body = json!({"model": tiny::MIX.model, "prompt": "hello", "max_tokens": 4});
        assert_eq!(acme.http.post("/v1/completions", &body).status, 200);
        pagedd_tests::process::kill_descendant(daemon.root(), gateway.pid);
        wait::until("it serves again", LIMIT, || {
            daemon.processes().iter().any(|process| process.name == "gw:acme" && process.pid != gateway.pid)
                && acme.http.get("/readyz").status == 200
        });
        assert_eq!(daemon.ctl(&["tenant", "remove", "acme", "--force"]).code, Some(0));
        wait::until("its gateway is gone", LIMIT, || {
            !daemon.processes().iter().any(|process| process.name == "gw:acme")
        });
        daemon.stop();
    }
}
