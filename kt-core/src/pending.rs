//! Work under way.

use crate::error::{Error, Result};

/// Work under way; [`wait`](Pending::wait) gives its buffers back.
///
/// Dropping it without waiting is sound: the work owns its buffers, and finishes or is cancelled on its own.
#[must_use = "the work's buffers come back through wait()"]
pub struct Pending<T> {
    state: State<T>,
}

enum State<T> {
    Ready(Result<T>),
    Waiting(Box<dyn FnOnce() -> Result<T> + Send>),
}

impl<T> Pending<T> {
    /// Work that is already done, or failed.
    pub fn ready(result: Result<T>) -> Self {
        Pending { state: State::Ready(result) }
    }

    /// Work that `wait` finishes: it blocks until the work is done, and may help with it.
    pub fn new(wait: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        Pending { state: State::Waiting(Box::new(wait)) }
    }

    /// Blocks until the work is done.
    ///
    /// # Errors
    /// What the backend reported; a panic inside it becomes [`Error::Backend`].
    pub fn wait(self) -> Result<T> {
        match self.state {
            State::Ready(result) => result,
            State::Waiting(wait) => wait(),
        }
    }
}

impl<T: Send + 'static> Pending<T> {
    /// Applies `f` to the result when it is waited for.
    pub fn map<U: 'static>(self, f: impl FnOnce(T) -> Result<U> + Send + 'static) -> Pending<U> {
        match self.state {
            State::Ready(Err(e)) => Pending::ready(Err(e)),
            State::Ready(Ok(v)) => Pending::new(move || f(v)),
            State::Waiting(wait) => Pending::new(move || f(wait()?)),
        }
    }
}

/// Runs `f`, turning a panic into an [`Error::Backend`].
pub(crate) fn contain<T>(backend: &str, layer: usize, f: impl FnOnce() -> T) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).map_err(|payload| {
        let what = format!("panicked: {}", panic_text(&*payload));
        // What a panic carries may panic when it is dropped.
        std::mem::forget(payload);
        Error::Backend { backend: backend.into(), layer, what }
    })
}

/// Keeps the payload of the first panic. What another one carries may panic when it is dropped, and this thread must go on.
pub(crate) fn keep_first(first: &mut Option<Box<dyn std::any::Any + Send>>, payload: Box<dyn std::any::Any + Send>) {
    match first {
        None => *first = Some(payload),
        Some(_) => std::mem::forget(payload),
    }
}

/// What a panic said.
pub(crate) fn panic_text(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown panic".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_whatever_it_carries() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        let said = |f: fn()| contain("abacus", 3, f).unwrap_err().to_string();
        assert!(said(|| std::panic::panic_any(Bomb)).contains("unknown panic"));
        assert!(said(|| panic!("on purpose")).contains("panicked: on purpose"));
    }
}
