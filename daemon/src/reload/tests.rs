use super::*;

fn split_of(line: &str) -> (Vec<String>, Vec<String>) {
    let texts = |args: Vec<OsString>| args.into_iter().map(|arg| arg.into_string().unwrap()).collect();
    let (all, first) = split(line.split_whitespace().map(OsString::from));
    (texts(all), texts(first))
}

#[test]
fn the_flag_is_for_the_first_daemon_alone_in_both_its_forms() {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(
        split_of("--config c --reload-checkpoint p --state-dir s"),
        (words("--config c --state-dir s"), words("--reload-checkpoint p"))
    );
    assert_eq!(split_of("--reload-checkpoint=p -x"), (words("-x"), words("--reload-checkpoint=p")));
    assert_eq!(split_of("--reload-checkpoints p"), (words("--reload-checkpoints p"), Vec::new()));
}

#[test]
fn an_order_is_found_by_the_next_start_and_the_flag_comes_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let wanted = |flag: Option<&str>| wanted(dir.path(), flag.map(Path::new)).unwrap();
    assert_eq!(wanted(None), None);
    order(dir.path(), Path::new("/c/one")).unwrap();
    assert_eq!(wanted(None), Some(Wanted::Order("/c/one".into())));
    assert_eq!(wanted(Some("/c/two")), Some(Wanted::Flag("/c/two".into())));
}

#[test]
fn a_flag_that_comes_with_every_start_is_obeyed_once_for_each_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), OBEYED, b"/c/one").unwrap();
    let wanted = |path: &str| wanted(dir.path(), Some(Path::new(path))).unwrap();
    assert_eq!(wanted("/c/one"), None);
    assert_eq!(wanted("/c/two"), Some(Wanted::Flag("/c/two".into())));
}

#[test]
fn a_checkpoint_is_the_same_by_whatever_path() {
    let dir = tempfile::tempdir().unwrap();
    let (path, link) = (dir.path().join("one"), dir.path().join("link"));
    fs::create_dir(&path).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    write(dir.path(), OBEYED, path.as_os_str().as_bytes()).unwrap();
    let wanted = |path: PathBuf| wanted(dir.path(), Some(&path)).unwrap();
    assert_eq!([path.join(""), path.join("../one"), link].map(wanted), [None, None, None]);
    let other = dir.path().join("two");
    assert_eq!(wanted(other.clone()), Some(Wanted::Flag(other)));
}

#[test]
fn an_order_that_cannot_be_written_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    // A directory is in its place: the last step fails.
    fs::create_dir(dir.path().join(ORDER)).unwrap();
    assert!(order(dir.path(), Path::new("/c/one")).is_err());
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [ORDER]);
}
