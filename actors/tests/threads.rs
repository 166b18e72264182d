//! Real threads, no database: handlers that block, and threads that must be gone afterwards. The only tests that take real time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use uuid::Uuid;
use workpump_actors::options::Options;
use workpump_actors::runner::{Job, Runner};
use workpump_actors::testing::{FakeStore, Row, engine_parts, runner};
use workpump_actors::tree::{Engine, EngineParts};
use workpump_actors::work::Category;

fn handlers() -> Runtime {
    Builder::new_multi_thread().worker_threads(4).enable_time().build().expect("a runtime")
}

fn parts(store: &Arc<FakeStore>, handlers: &Runtime, runner: Arc<dyn Runner>) -> EngineParts {
    let _inside = handlers.enter();
    engine_parts(Options::default(), store, vec![(Category::Inbox, runner)])
}

/// A runtime-free executor: nothing of tokio or actix is in scope.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

fn threads() -> Vec<String> {
    std::fs::read_dir("/proc/self/task")
        .map(|tasks| {
            tasks
                .flatten()
                .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
                .filter(|name| name.starts_with("actix") || name.starts_with("workpump"))
                .collect()
        })
        .unwrap_or_default()
}

#[test]
fn real_threads_serve_blocking_handlers_and_any_runtime_and_are_gone_afterwards() {
    a_handler_that_blocks_its_thread_holds_up_only_its_own_lane();
    results_are_written_although_the_only_thread_is_blocked();
    an_engine_works_from_a_plain_thread_a_tokio_runtime_and_an_actix_system();
    many_threads_keep_the_order_of_every_stream();
    // A thread that was joined may still be listed for an instant.
    let gone = async {
        while !threads().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let watch = Builder::new_current_thread().enable_time().build().expect("a runtime");
    let all_gone = watch.block_on(async { tokio::time::timeout(Duration::from_mins(1), gone).await });
    assert!(all_gone.is_ok(), "{:?}", threads());
}

fn a_handler_that_blocks_its_thread_holds_up_only_its_own_lane() {
    let handlers = handlers();
    let store = FakeStore::new();
    let (release, blocked) = mpsc::channel::<()>();
    let blocked = Arc::new(std::sync::Mutex::new(blocked));
    let done = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&done);
    let blocking = runner(1, move |job: Job| {
        let (blocked, count) = (Arc::clone(&blocked), Arc::clone(&count));
        async move {
            if job.work.stream_id.is_some() {
                // Blocks the thread until the test lets go.
                let _ = blocked.lock().map(|blocked| blocked.recv());
            } else if job.work.seq % 3 == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    });
    store.insert_many(200, &Row::default());
    store.insert_many(3, &Row::of_stream(Uuid::now_v7()));
    store.insert_many(200, &Row::default());
    let engine = block_on(Engine::start(parts(&store, &handlers, blocking))).expect("starts");
    handlers.block_on(async {
        while store.unfinished() > 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    assert_eq!(done.load(Ordering::Relaxed), 400, "all but the blocked lane");
    drop(release);
    handlers.block_on(store.finished());
    let report = block_on(engine.drain());
    assert_eq!((report.abandoned, report.deregistered), (0, true));
}

fn results_are_written_although_the_only_thread_is_blocked() {
    let handlers = Builder::new_multi_thread().worker_threads(1).enable_time().build().expect("a runtime");
    let watch = Builder::new_current_thread().enable_time().build().expect("a runtime");
    let store = FakeStore::new();
    let (release, blocked) = mpsc::channel::<()>();
    let blocked = Arc::new(std::sync::Mutex::new(blocked));
    let blocking = runner(1, move |job: Job| {
        let blocked = Arc::clone(&blocked);
        async move {
            if job.work.seq == 10 {
                // Blocks the thread until the test lets go.
                let _ = blocked.lock().map(|blocked| blocked.recv());
            }
            Ok(())
        }
    });
    store.insert_many(11, &Row::default());
    let engine = block_on(Engine::start(parts(&store, &handlers, blocking))).expect("starts");
    watch.block_on(async {
        while store.unfinished() > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    drop(release);
    watch.block_on(store.finished());
    block_on(engine.drain());
}

fn an_engine_works_from_a_plain_thread_a_tokio_runtime_and_an_actix_system() {
    let one_life = |handlers: &Runtime| {
        let store = FakeStore::new();
        store.insert_many(50, &Row::default());
        let parts = parts(&store, handlers, runner(1, |_| async { Ok(()) }));
        async move {
            let engine = Engine::start(parts).await.expect("starts");
            while store.unfinished() > 0 {
                engine.observe().await;
            }
            assert!(engine.is_ready());
            assert!(engine.drain().await.deregistered);
            assert!(!engine.is_ready());
        }
    };
    let handlers = handlers();
    block_on(one_life(&handlers));
    Builder::new_current_thread().build().expect("a runtime").block_on(one_life(&handlers));
    actix::System::new().block_on(one_life(&handlers));
    let dropped =
        block_on(Engine::start(parts(&FakeStore::new(), &handlers, runner(1, |_| async { Ok(()) }))));
    drop(dropped.expect("starts"));
    handlers.block_on(async {
        while !threads().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
}

fn many_threads_keep_the_order_of_every_stream() {
    let handlers = handlers();
    let store = FakeStore::new();
    let streams: Vec<_> = (0..40).map(|_| Uuid::now_v7()).collect();
    let mut expected = Vec::new();
    for _ in 0..50 {
        for stream in &streams {
            expected.push((*stream, store.insert(Row::of_stream(*stream))));
        }
    }
    let busy: Arc<Vec<_>> =
        Arc::new(streams.iter().map(|stream| (*stream, AtomicBool::new(false))).collect());
    let flags = Arc::clone(&busy);
    let strict = runner(1, move |job: Job| {
        let flags = Arc::clone(&flags);
        async move {
            let flag =
                &flags.iter().find(|(stream, _)| Some(*stream) == job.work.stream_id).expect("known").1;
            assert!(!flag.swap(true, Ordering::SeqCst), "two rows of a stream at once");
            if job.work.seq % 7 == 0 {
                tokio::task::yield_now().await;
            }
            flag.store(false, Ordering::SeqCst);
            Ok(())
        }
    });
    let engine = block_on(Engine::start(parts(&store, &handlers, strict))).expect("starts");
    handlers.block_on(store.finished());
    let settled: Vec<_> = store.settled().iter().map(|(key, ..)| *key).collect();
    for stream in &streams {
        let of_stream: Vec<_> =
            expected.iter().filter(|(other, _)| other == stream).map(|(_, key)| *key).collect();
        let order: Vec<_> = settled.iter().filter(|key| of_stream.contains(key)).copied().collect();
        assert_eq!(order, of_stream);
    }
    block_on(engine.drain());
}
