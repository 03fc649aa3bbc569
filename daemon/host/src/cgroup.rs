//! Where this process stands in the cgroup trees, v1 and v2.
//!
//! **Owns** the reading of /proc/self/cgroup and /proc/self/mountinfo. **Never** writes. Every path is taken under a root
//! directory, `/` in production and a made-up tree in tests.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

/// Which tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tree {
    /// The unified one.
    V2,
    /// The v1 hierarchy of a controller.
    V1(&'static str),
}

/// This process's cgroup in one tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Own {
    /// Where the tree is mounted: the topmost directory that can be seen.
    mount: PathBuf,
    /// The cgroup's directory, at or below `mount`.
    pub dir: PathBuf,
}

impl Own {
    /// The cgroup and its ancestors, upwards, as far as they can be seen.
    pub fn upwards(&self) -> impl Iterator<Item = &Path> {
        self.dir.ancestors().take_while(|dir| dir.starts_with(&self.mount))
    }
}

/// Finds this process's cgroup; `None` where it has none in that tree, or the tree is not mounted.
pub(crate) fn own(root: &Path, tree: Tree) -> Option<Own> {
    let membership = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let path = membership.lines().find_map(|line| path_in(line, tree))?;
    let mounts: Vec<Mount> = mounts.lines().filter_map(|line| mount_of(line, tree)).collect();
    // A container may see the tree more than once; the mount that contains the cgroup is the one to use.
    let inside = mounts.iter().find_map(|mount| Some((mount, below(&mount.root, path)?)));
    // A cgroup outside of what is mounted (`/../x` in a cgroup namespace): the mounted part is all there is to read.
    let (mount, rest) = inside.or_else(|| Some((mounts.first()?, PathBuf::new())))?;
    let mount = root.join(mount.point.strip_prefix("/").unwrap_or(&mount.point));
    let dir = if rest.as_os_str().is_empty() { mount.clone() } else { mount.join(rest) };
    Some(Own { mount, dir })
}

/// Those of `wanted` that a mounted v1 hierarchy has: the unified tree does not get them.
pub(crate) fn v1_controllers(root: &Path, wanted: &[&str]) -> Vec<String> {
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    let has = |name: &str| {
        mounts.lines().any(|line| v1_options(line).is_some_and(|mut has| has.any(|o| o == name)))
    };
    wanted.iter().filter(|name| has(name)).map(ToString::to_string).collect()
}

/// Options of a line's mount, where it is of v1.
fn v1_options(line: &str) -> Option<impl Iterator<Item = &str>> {
    let (_, after) = line.split_once(" - ")?;
    let mut after = after.split(' ');
    (after.next() == Some("cgroup")).then(|| after.nth(1).unwrap_or("").split(','))
}

struct Mount {
    /// The cgroup that appears at `point`.
    root: PathBuf,
    point: PathBuf,
}

/// The path in a line `id:controllers:path`, where the line is of `tree`.
fn path_in(line: &str, tree: Tree) -> Option<&str> {
    let (id, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let matches = match tree {
        Tree::V2 => id == "0" && controllers.is_empty(),
        Tree::V1(controller) => controllers.split(',').any(|name| name == controller),
    };
    matches.then_some(path)
}

/// `id parent device root point options [tags…] - type source super-options`
fn mount_of(line: &str, tree: Tree) -> Option<Mount> {
    let (before, after) = line.split_once(" - ")?;
    let mut before = before.split(' ');
    let (root, point) = (before.nth(3)?, before.next()?);
    let mut after = after.split(' ');
    let (kind, options) = (after.next()?, after.nth(1).unwrap_or(""));
    let matches = match tree {
        Tree::V2 => kind == "cgroup2",
        Tree::V1(controller) => kind == "cgroup" && options.split(',').any(|name| name == controller),
    };
    matches.then(|| Mount { root: unescape(root), point: unescape(point) })
}

/// Spaces, tabs, line feeds and backslashes are written as `\ooo`.
fn unescape(field: &str) -> PathBuf {
    let bytes = field.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).filter(|_| bytes[at] == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(byte) = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            out.push(byte);
            at += 4;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

/// `path` relative to `root`, where it lies at or below it.
fn below(root: &Path, path: &str) -> Option<PathBuf> {
    let path = Path::new(path);
    if path.components().any(|part| part == Component::ParentDir) {
        return None;
    }
    path.strip_prefix(root).ok().map(Path::to_owned)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A made-up root directory.
    pub(crate) struct FakeRoot(tempfile::TempDir);

    impl FakeRoot {
        pub fn new(cgroup: &str, mountinfo: &str) -> Self {
            let root = Self(tempfile::tempdir().unwrap());
            root.file("proc/self/cgroup", cgroup);
            root.file("proc/self/mountinfo", mountinfo);
            root
        }

        pub fn file(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        pub fn path(&self) -> &Path {
            self.0.path()
        }

        fn own(&self, tree: Tree) -> Option<String> {
            own(self.path(), tree)
                .map(|own| own.dir.strip_prefix(self.path()).unwrap().to_str().unwrap().to_owned())
        }
    }

    pub(crate) const V2_MOUNT: &str =
        "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn only_the_line_of_the_right_tree_counts() {
        let root = FakeRoot::new(
            "12:cpuset:/set\n4:cpuacct:/acct\n3:cpu,cpuacct:/cpu\n1:name=cpu:/named\n0::/unified\n",
            "30 22 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
             31 22 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
             32 22 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:1 - cgroup cgroup rw,cpu,cpuacct\n",
        );
        assert_eq!(root.own(Tree::V2).as_deref(), Some("sys/fs/cgroup/unified/unified"));
        assert_eq!(root.own(Tree::V1("cpu")).as_deref(), Some("sys/fs/cgroup/cpu,cpuacct/cpu"));
        assert_eq!(root.own(Tree::V1("memory")), None);
    }

    #[test]
    fn a_container_sees_its_own_part_of_the_tree() {
        let root = FakeRoot::new(
            "3:cpu:/docker/abc/inner\n",
            "32 22 0:28 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n",
        );
        assert_eq!(root.own(Tree::V1("cpu")).as_deref(), Some("sys/fs/cgroup/cpu/inner"));
    }

    #[test]
    fn a_cgroup_outside_the_mounted_part_is_read_as_the_mounted_part() {
        let root = FakeRoot::new("0::/../../elsewhere\n", V2_MOUNT);
        assert_eq!(root.own(Tree::V2).as_deref(), Some("sys/fs/cgroup"));
    }

    #[test]
    fn escaped_mount_points_are_read() {
        let root = FakeRoot::new("0::/a\n", "30 22 0:26 / /odd\\040place\\134 rw - cgroup2 none rw\n");
        assert_eq!(root.own(Tree::V2).as_deref(), Some("odd place\\/a"));
    }

    #[test]
    fn ancestors_end_at_the_mount() {
        let root = FakeRoot::new("0::/a/b\n", V2_MOUNT);
        let own = own(root.path(), Tree::V2).unwrap();
        let mount = root.path().join("sys/fs/cgroup");
        assert_eq!(own.upwards().collect::<Vec<_>>(), [mount.join("a/b"), mount.join("a"), mount]);
    }

    #[test]
    fn garbage_is_no_cgroup() {
        for (cgroup, mounts) in [("", ""), ("0::", "- -"), ("::\n0:", V2_MOUNT), ("0::/a", "1 2 3 - cgroup2")]
        {
            let root = FakeRoot::new(cgroup, mounts);
            assert_eq!(root.own(Tree::V2), None, "{cgroup:?} {mounts:?}");
        }
    }
}
