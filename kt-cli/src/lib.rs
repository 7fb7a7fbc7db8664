//! What the command `kt` is made of: its subcommands, and the [`host`] that runs whole models.

use std::fmt::Display;
use std::io::Write;

use anyhow::Context;

/// A line on standard output, as `println!`, but with an error in place of a panic: see [`put`].
macro_rules! say {
    ($($text:tt)*) => {
        $crate::put(format_args!("{}\n", format_args!($($text)*)))
    };
}

/// Lines on standard error, as std's; where nobody reads them, they are lost without a panic.
macro_rules! eprintln {
    ($($text:tt)*) => {{
        use ::std::io::Write as _;
        let _ = ::std::writeln!(::std::io::stderr(), $($text)*);
    }};
}

/// Text on standard error, as std's: see `eprintln` above.
macro_rules! eprint {
    ($($text:tt)*) => {{
        use ::std::io::Write as _;
        let _ = ::std::write!(::std::io::stderr(), $($text)*);
    }};
}

pub mod bench;
pub mod convert;
#[cfg(all(feature = "amx", target_arch = "x86_64"))]
pub mod crossover;
pub mod doctor;
pub mod eval;
pub mod host;
pub mod limits;
pub mod model;
pub mod observe;
pub mod options;
pub mod placing;
pub mod plan;
#[cfg(feature = "plugins")]
pub mod plugins;
pub mod run;
pub mod system;

/// Whether what [`put`] wrote is read: of errors, only a closed pipe says that it is not.
pub(crate) fn is_read(put: anyhow::Result<()>) -> anyhow::Result<bool> {
    match put {
        Ok(()) => Ok(true),
        Err(e) if is_closed(&e) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Whether an error is that nobody reads standard output any more.
pub fn is_closed(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Writes to standard output, at once.
///
/// # Errors
/// Nobody reads it any more, which the command takes for the end of its work; or what it goes to is full.
pub(crate) fn put(text: impl Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).context("standard output")
}
