//! Control groups of the tests' own.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A control group, gone when dropped.
pub struct Group {
    dir: PathBuf,
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.dir);
    }
}

impl Group {
    /// A group of version 1 or 2 for `controller` (`memory`, `cpu`), or why there can be none.
    pub fn new(controller: &str, name: &str) -> Result<Group, String> {
        fn said(what: &Path) -> impl Fn(std::io::Error) -> String {
            move |e| format!("{}: {e}", what.display())
        }
        let name = format!("kt-test-{name}-{}", std::process::id());
        let root = Path::new("/sys/fs/cgroup");
        let v1 = root.join(controller);
        let dir = if v1.join("cgroup.procs").exists() {
            v1.join(name)
        } else {
            let controllers = std::fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
            if !controllers.split_whitespace().any(|c| c == controller) {
                return Err(format!("no control groups of {controller} are mounted at /sys/fs/cgroup"));
            }
            let subtree = root.join("cgroup.subtree_control");
            std::fs::write(&subtree, format!("+{controller}")).map_err(said(&subtree))?;
            root.join(name)
        };
        std::fs::create_dir(&dir).map_err(said(&dir))?;
        Ok(Group { dir })
    }

    /// Writes a setting to its file, of version 1 or 2.
    pub fn try_set(&self, files: [&str; 2], value: &str) -> std::io::Result<()> {
        let file = files.map(|f| self.dir.join(f)).into_iter().find(|f| f.exists());
        std::fs::write(file.ok_or(std::io::ErrorKind::NotFound)?, value)
    }

    /// As [`Group::try_set`]; the test fails where it cannot.
    pub fn set(&self, files: [&str; 2], value: &str) {
        self.try_set(files, value).unwrap_or_else(|e| panic!("{}: {files:?}: {e}", self.dir.display()));
    }

    /// Whether the group is of version 2.
    pub fn is_v2(&self) -> bool {
        self.dir.join("cgroup.controllers").exists()
    }

    /// The command, in this group from its first page on.
    pub fn inside(&self, command: &Command) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.dir.join("cgroup.procs"));
        shell.arg(command.get_program()).args(command.get_args());
        shell
    }
}
