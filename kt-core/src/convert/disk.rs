//! Free space of a filesystem.

#![allow(unsafe_code)] // asks the system

use std::path::Path;

/// Bytes that this user may still write where `path` is; `None` where the system does not say.
#[cfg(unix)]
pub fn free_bytes(path: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: all-zero bytes are a valid `statvfs`, which holds numbers only.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: `path` ends with a zero byte, and `stat` is writable and of the right type.
    let failed = unsafe { libc::statvfs(path.as_ptr(), &mut stat) } != 0;
    (!failed).then(|| (stat.f_bavail as u64).saturating_mul(stat.f_frsize as u64))
}

/// Bytes that this user may still write where `path` is; `None` where the system does not say.
#[cfg(not(unix))]
pub fn free_bytes(_path: &Path) -> Option<u64> {
    None
}
