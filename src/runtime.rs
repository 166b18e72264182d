//! Runtimes of the pump's own: one drives its connections, one runs the user's handlers. Neither can stall the other, or the host.

use tokio::runtime::{Builder, Handle, Runtime};

/// A multi-thread runtime that ends in the background when dropped, from whatever context.
#[derive(Debug)]
pub(crate) struct OwnRuntime {
    handle: Handle,
    /// Only taken by drop.
    runtime: Option<Runtime>,
}

impl OwnRuntime {
    pub(crate) fn start(name: &str, threads: usize) -> std::io::Result<Self> {
        let runtime =
            Builder::new_multi_thread().worker_threads(threads).thread_name(name).enable_all().build()?;
        Ok(Self { handle: runtime.handle().clone(), runtime: Some(runtime) })
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
