//! The start is all or nothing, and the end is an end: nothing is left running, whoever let go of what.

mod registry_common;

use std::time::Duration;

use actix::prelude::*;
use tokio::time::{Instant, sleep, timeout};
use workpump_actors::registry::{
    Backoff, ChildState, Cx, Group, Host, Intensity, Registry, Restart, Spec, StartFailed, Strategy,
};
use workpump_actors::testing::in_virtual_time;

use registry_common::{History, Lines, Log, Note, Plan, Quit, Subject, addr, at_most, info, millis, start};

fn well(name: &str, log: &Log) -> Spec<Subject> {
    Subject::spec(name, log, Plan::default())
}

fn bad(name: &str, log: &Log) -> Spec<Subject> {
    Subject::spec(name, log, Plan { bad_start: Some(|_| true), ..Plan::default() })
}

fn slow(name: &str, log: &Log, seconds: u64) -> Spec<Subject> {
    Subject::spec(name, log, Plan { slow_start: Duration::from_secs(seconds), ..Plan::default() })
}

/// Why a group does not start within ten seconds.
async fn refused(group: Group) -> String {
    let failed = group.start(Host::current(), Duration::from_secs(10)).await;
    failed.expect_err("it must not start").to_string()
}

#[test]
fn each_child_that_fails_is_named_and_those_before_it_are_stopped_again() {
    in_virtual_time(async {
        for failing in 0..3 {
            let log = Log::default();
            let group = ["a", "b", "c"].iter().enumerate().fold(Group::new("test"), |group, (at, name)| {
                group.child(if at == failing { bad(name, &log) } else { well(name, &log) })
            });
            let name = ["a", "b", "c"][failing];
            assert_eq!(refused(group).await, format!("{name} did not start: it panicked: a bad start"));
            let did = log.take();
            let (starts, stops): (Vec<_>, Vec<_>) = did.iter().partition(|line| line.starts_with("start"));
            assert_eq!((starts.len(), stops.len()), (failing + 1, failing), "{did:?}");
        }
    });
}

#[test]
fn a_child_of_a_nested_group_that_fails_is_named_and_everything_is_stopped_in_reverse() {
    in_virtual_time(async {
        let log = Log::default();
        let inner = Group::new("inner").child(well("b", &log)).child(bad("c", &log)).child(well("d", &log));
        let group = Group::new("outer").child(well("a", &log)).group(inner).child(well("e", &log));
        assert_eq!(refused(group).await, "c did not start: it panicked: a bad start");
        assert_eq!(log.take(), ["start a", "start b", "start c", "stop b", "stop a"]);
    });
}

#[test]
fn the_deadline_names_the_child_that_everybody_waits_for_even_inside_a_nested_group() {
    in_virtual_time(async {
        let log = Log::default();
        let begin = Instant::now();
        let inner = Group::new("inner").child(well("b", &log)).child(slow("c", &log, 11));
        let group = Group::new("outer").child(well("a", &log)).group(inner);
        assert_eq!(refused(group).await, "c did not start: not ready within 10000 ms");
        assert_eq!(begin.elapsed(), Duration::from_secs(10));
        assert_eq!(log.take(), ["start a", "start b", "start c", "stop c", "stop b", "stop a"]);
    });
}

#[test]
fn a_child_that_ends_before_it_is_ready_fails_the_start_unless_it_may_finish() {
    struct Job;
    impl Actor for Job {
        type Context = Context<Self>;
        fn started(&mut self, ctx: &mut Self::Context) {
            ctx.stop();
        }
    }
    let job = || Spec::new("job", |_| Job);
    in_virtual_time(async {
        let refused = refused(Group::new("test").child(job())).await;
        assert_eq!(refused, "job did not start: it ended before it was ready");
        for kind in [Restart::Transient, Restart::Temporary] {
            let group = Group::new("test").child(job().restart(kind)).child(slow("a", &Log::default(), 1));
            let registry = start(group).await;
            assert_eq!(info(&registry, "job").state, ChildState::Finished);
            assert!(registry.health().is_ready(), "{}", registry.health());
            let added = Spec::new("late job", |_| Job).restart(kind);
            assert_eq!(registry.add("test", added).await, Ok(()), "it has done what it was there for");
            assert_eq!(info(&registry, "late job").state, ChildState::Finished);
            registry.shutdown().await;
        }
    });
}

#[test]
fn a_job_that_finishes_while_others_still_start_is_no_failure() {
    in_virtual_time(async {
        let log = Log::default();
        let job = well("job", &log).restart(Restart::Transient);
        let quit = job.addr();
        let group = Group::new("test").child(job).child(slow("a", &log, 1));
        let starting = start(group);
        let quitting = async {
            sleep(millis(100)).await;
            quit.do_send(Quit);
        };
        let (registry, ()) = tokio::join!(starting, quitting);
        assert_eq!(info(&registry, "job").state, ChildState::Finished);
        registry.shutdown().await;
        assert_eq!(log.take(), ["start job", "start a", "stop job", "stop a"]);
    });
}

#[test]
fn a_caller_that_loses_patience_leaves_nothing_running() {
    in_virtual_time(async {
        let log = Log::default();
        let spec = well("a", &log);
        let a = spec.addr();
        let starting = start(Group::new("test").child(spec).child(slow("b", &log, 60)));
        assert!(timeout(Duration::from_secs(1), starting).await.is_err());
        sleep(millis(1)).await;
        assert_eq!(log.take(), ["start a", "start b", "stop b", "stop a"]);
        assert!(!a.connected());
    });
}

#[test]
fn the_last_handle_that_is_dropped_stops_the_tree_and_handles_of_actors_do_not_count() {
    struct Holder(Registry);
    impl Actor for Holder {
        type Context = Context<Self>;
    }
    impl Handler<Note> for Holder {
        type Result = u64;
        fn handle(&mut self, _: Note, _: &mut Self::Context) -> u64 {
            self.0.children().len() as u64
        }
    }
    in_virtual_time(async {
        let log = Log::default();
        let holder = Spec::new("holder", |cx: &mut Cx<Holder>| Holder(cx.registry()));
        let address = holder.addr();
        let registry = start(Group::new("test").child(well("a", &log)).child(holder)).await;
        assert_eq!(address.send(Note(0)).await, Ok(3));
        let clone = registry.clone();
        drop(registry);
        sleep(millis(1)).await;
        assert_eq!(log.take(), ["start a"]);
        drop(clone);
        sleep(millis(1)).await;
        assert_eq!(log.take(), ["stop a"]);
        assert!(!address.connected());
    });
}

#[test]
fn a_tree_is_shut_down_once_however_often_and_by_however_many_it_is_asked() {
    in_virtual_time(async {
        let log = Log::default();
        let plan = Plan { drain: Duration::from_secs(1), ..Plan::default() };
        let registry = start(Group::new("test").child(Subject::spec("a", &log, plan))).await;
        assert!(registry.health().is_ready(), "{}", registry.health());
        let (other, begin) = (registry.clone(), Instant::now());
        tokio::join!(registry.shutdown(), other.shutdown());
        assert_eq!(begin.elapsed(), Duration::from_secs(1));
        registry.shutdown().await;
        assert_eq!(registry.terminated().await, Ok(()));
        assert_eq!(log.take(), ["start a", "drain a", "stop a"]);
        assert!(!registry.health().is_ready());
        let late = registry.add("test", well("b", &log)).await;
        assert_eq!(late, Err(StartFailed::NoSuchGroup("test".into())));
        assert_eq!(registry.remove("a").await, Err(StartFailed::NoSuchChild("a".into())));
        assert_eq!(registry.restart("a").await, Err(StartFailed::NoSuchChild("a".into())));
    });
}

/// Shuts the tree down from inside, in one way or another.
struct Suicidal(Registry);

#[derive(Clone, Copy, Message)]
#[rtype(result = "()")]
enum End {
    Spawned,
    Waited,
    Stopping,
}

#[derive(Message)]
#[rtype(result = "()")]
struct EndInAnswer;

impl Actor for Suicidal {
    type Context = Context<Self>;
}

impl Handler<End> for Suicidal {
    type Result = ();

    fn handle(&mut self, how: End, ctx: &mut Self::Context) {
        let registry = self.0.clone();
        let ending = async move { registry.shutdown().await }.into_actor(self);
        match how {
            End::Spawned => {
                ctx.spawn(ending);
            }
            End::Waited => ctx.wait(ending),
            End::Stopping => self.0.stop(),
        }
    }
}

impl Handler<EndInAnswer> for Suicidal {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: EndInAnswer, _: &mut Self::Context) -> Self::Result {
        let registry = self.0.clone();
        Box::pin(async move { registry.shutdown().await })
    }
}

#[test]
fn a_shutdown_asked_by_an_actor_of_the_tree_does_not_hang() {
    in_virtual_time(async {
        for how in [Some(End::Spawned), Some(End::Waited), Some(End::Stopping), None] {
            let log = Log::default();
            let suicidal = Spec::new("suicidal", |cx: &mut Cx<Suicidal>| Suicidal(cx.registry()));
            let address = suicidal.addr();
            let registry = start(Group::new("test").child(well("a", &log)).child(suicidal)).await;
            let begin = Instant::now();
            match how {
                Some(how) => address.do_send(how),
                None => assert_eq!(address.send(EndInAnswer).await, Ok(())),
            }
            assert_eq!(registry.terminated().await, Ok(()));
            assert_eq!(begin.elapsed(), Duration::ZERO);
            assert_eq!(log.take(), ["start a", "stop a"]);
        }
    });
}

#[test]
fn a_tree_that_cannot_work_is_refused_before_anything_starts_and_says_what_to_change() {
    in_virtual_time(async {
        let log = Log::default();
        let twice = Group::new("test").child(well("a", &log)).group(Group::new("g").child(well("a", &log)));
        let duplicate = "there is already a child called a: give every child of a tree its own name";
        assert_eq!(refused(twice).await, duplicate);
        let as_group = Group::new("a").child(well("a", &log));
        assert_eq!(refused(as_group).await, duplicate);
        let both = Group::new("test")
            .child(well("a", &log).provides::<Note>())
            .child(well("b", &log).provides::<Note>());
        let conflict = refused(both).await;
        assert!(conflict.starts_with("both a and b provide ") && conflict.contains("Note"), "{conflict}");
        let orderless = Group::new("test").in_parallel().strategy(Strategy::RestForOne);
        assert_eq!(
            refused(orderless).await,
            "test starts its children in parallel, so none comes after another: use one-for-one or one-for-all"
        );
        let slow_pauses = Backoff { first: Duration::from_secs(30), ..Backoff::default() };
        let slow_pauses = Backoff { max: Duration::from_secs(30), ..slow_pauses };
        let never = Group::new("test").backoff(slow_pauses).child(well("a", &log));
        let unreachable = refused(never).await;
        assert!(unreachable.starts_with("the restart policy of a cannot work: 10 restarts take up to"));
        let tight = Intensity { max_restarts: 3, within: Duration::from_millis(1) };
        let never = Group::new("test").child(well("a", &log).intensity(tight));
        assert!(
            refused(never).await.contains("allow fewer restarts, shorten the pauses, or widen the window")
        );
        let of_group = Group::new("inner").as_child(Restart::Permanent, at_most(10), slow_pauses);
        assert!(refused(Group::new("test").group(of_group)).await.starts_with("the restart policy of inner"));
        assert_eq!(log.take(), [""; 0]);
    });
}

#[test]
fn messages_that_nobody_will_handle_are_counted_and_reported_when_the_tree_ends() {
    in_virtual_time(async {
        let lines = Lines::catch();
        let log = Log::default();
        let registry = start(Group::new("test").child(well("a", &log)).child(well("b", &log))).await;
        let (a, mut history) = (addr(&registry, "a"), History::of(&registry));
        a.do_send(Quit);
        registry.stop();
        let answers: Vec<_> = (0..3).map(|number| a.send(Note(number))).collect();
        registry.shutdown().await;
        for answer in answers {
            assert_eq!(answer.await, Err(MailboxError::Closed));
        }
        assert_eq!(registry.totals().undelivered, 3);
        let told = history.take();
        assert!(told.iter().any(|line| line.ends_with("closed with 3 messages undelivered")), "{told:?}");
        let warned = lines.of("WARN");
        assert_eq!(warned.iter().filter(|line| line.contains("undelivered=3")).count(), 1, "{warned:?}");
        assert_eq!(a.send(Note(9)).await, Err(MailboxError::Closed));
    });
}

#[test]
fn an_undelivered_message_that_panics_when_it_is_dropped_does_not_disturb_the_end() {
    #[derive(Message)]
    #[rtype(result = "()")]
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            assert!(std::thread::panicking(), "a bomb went off");
        }
    }
    struct Deaf;
    impl Actor for Deaf {
        type Context = Context<Self>;
        fn started(&mut self, ctx: &mut Self::Context) {
            ctx.spawn(sleep(millis(1)).into_actor(self).map(|(), _, ctx| {
                ctx.wait(std::future::pending::<()>().into_actor(&Self));
            }));
        }
    }
    impl Handler<Bomb> for Deaf {
        type Result = ();
        fn handle(&mut self, _: Bomb, _: &mut Self::Context) {}
    }
    in_virtual_time(async {
        let log = Log::default();
        let registry =
            start(Group::new("test").child(well("a", &log)).child(Spec::new("deaf", |_| Deaf))).await;
        sleep(millis(10)).await;
        registry.addr::<Deaf>().expect("known").do_send(Bomb);
        registry.shutdown().await;
        assert_eq!((registry.totals().undelivered, log.take().len()), (1, 2));
        assert!(!addr(&registry, "a").connected());
    });
}
