//! Places at which a test ends the gateway.
//!
//! **Owns** nothing. **Never** does anything but in test builds: see `fail`.

/// In test builds the fail point `name` ends the process, unless an earlier one has left its mark at the path that it returns.
pub(crate) fn point(name: &str) {
    fail::fail_point!(name, |mark: Option<String>| {
        if mark.is_some_and(|mark| std::fs::File::create_new(mark).is_ok()) {
            std::process::abort();
        }
    });
    // Without fail points it has no use.
    let _ = name;
}
