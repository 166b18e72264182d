//! Random trees under random trouble: whatever happens, the promises hold.

mod registry_common;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::prelude::*;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::Strategy as _;
use tokio::time::sleep;
use workpump_actors::registry::{
    Backoff, ChildState, EventKind, Group, Intensity, Name, Registry, Restart, Spec, Strategy,
    SupervisorEvent,
};
use workpump_actors::testing::in_virtual_time;

use registry_common::millis;

/// How a random child behaves.
#[derive(Clone, Debug)]
struct Habit {
    restart: Restart,
    start_ms: u64,
    drain_ms: u64,
    /// Every how many lives fail in `started()`; never the first.
    bad_every: Option<u64>,
}

/// A random group.
#[derive(Clone, Debug)]
struct Plot {
    strategy: Strategy,
    ordered: bool,
    contained: bool,
    habits: Vec<Habit>,
    inner: Option<Box<Plot>>,
}

/// Random trouble. The numbers pick a child.
#[derive(Clone, Debug)]
enum Trouble {
    Crash(usize),
    Quit(usize),
    Restart(usize),
    Remove(usize),
    Add(usize, Habit),
    Sleep(u64),
}

fn habits() -> impl proptest::strategy::Strategy<Value = Habit> {
    let kinds = vec![Restart::Permanent, Restart::Permanent, Restart::Transient, Restart::Temporary];
    let times = (select(vec![0, 0, 5, 50]), select(vec![0, 0, 5, 50]));
    (select(kinds), times, select(vec![None, None, None, Some(2_u64), Some(3)])).prop_map(
        |(restart, (start_ms, drain_ms), bad_every)| Habit { restart, start_ms, drain_ms, bad_every },
    )
}

fn plots(inner: Option<Box<Plot>>) -> impl proptest::strategy::Strategy<Value = Plot> {
    let strategies = vec![Strategy::OneForOne, Strategy::RestForOne, Strategy::OneForAll];
    let habits = proptest::collection::vec(habits(), 1..5);
    (select(strategies), any::<bool>(), any::<bool>(), habits).prop_map(
        move |(strategy, ordered, contained, habits)| {
            let ordered = ordered || strategy == Strategy::RestForOne;
            Plot { strategy, ordered, contained, habits, inner: inner.clone() }
        },
    )
}

fn trees() -> impl proptest::strategy::Strategy<Value = Plot> {
    prop_oneof![plots(None), plots(None).prop_flat_map(|inner| plots(Some(Box::new(inner))))]
}

fn troubles() -> impl proptest::strategy::Strategy<Value = Vec<Trouble>> {
    let one = prop_oneof![
        4 => (0..20_usize).prop_map(Trouble::Crash),
        2 => (0..20_usize).prop_map(Trouble::Quit),
        2 => (0..20_usize).prop_map(Trouble::Restart),
        1 => (0..20_usize).prop_map(Trouble::Remove),
        1 => (0..20_usize, habits()).prop_map(|(at, habit)| Trouble::Add(at, habit)),
        4 => select(vec![0, 1, 7, 40, 200, 2_000]).prop_map(Trouble::Sleep),
    ];
    proptest::collection::vec(one, 1..30)
}

/// Counts who lives, and says when two lives of one child overlap.
#[derive(Clone, Default)]
struct Census(Arc<Mutex<HashMap<Name, Arc<AtomicU32>>>>, Arc<AtomicU32>);

struct Living {
    habit: Habit,
    life: u64,
    count: Arc<AtomicU32>,
    drained: bool,
}

#[derive(Message)]
#[rtype(result = "()")]
struct Quit;

impl Census {
    fn spec(&self, name: &str, habit: Habit) -> Spec<Living> {
        let census = self.clone();
        let kind = habit.restart;
        let make = move |cx: &mut workpump_actors::registry::Cx<Living>| {
            let count =
                Arc::clone(census.0.lock().expect("not poisoned").entry(cx.name().clone()).or_default());
            if count.fetch_add(1, Ordering::AcqRel) > 0 {
                census.1.fetch_add(1, Ordering::AcqRel);
            }
            Living { habit: habit.clone(), life: cx.generation(), count, drained: false }
        };
        Spec::new(name, make).restart(kind).stop_within(millis(30))
    }

    fn alive(&self) -> u32 {
        self.0.lock().expect("not poisoned").values().map(|count| count.load(Ordering::Acquire)).sum()
    }
}

impl Drop for Living {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Actor for Living {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let bad = self.life > 1 && self.habit.bad_every.is_some_and(|every| self.life.is_multiple_of(every));
        assert!(!bad, "a bad life");
        ctx.wait(sleep(millis(self.habit.start_ms)).into_actor(self));
    }

    fn stopping(&mut self, ctx: &mut Self::Context) -> Running {
        if self.habit.drain_ms == 0 || self.drained {
            return Running::Stop;
        }
        ctx.run_later(millis(self.habit.drain_ms), |this, ctx| {
            this.drained = true;
            ctx.stop();
        });
        Running::Continue
    }
}

impl Handler<Quit> for Living {
    type Result = ();

    fn handle(&mut self, _: Quit, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

/// Builds a group, and notes in which order its children stand.
fn build(plot: &Plot, name: &str, census: &Census, order: &mut Order) -> Group {
    let mut group = Group::new(name).strategy(plot.strategy);
    if !plot.ordered {
        group = group.in_parallel();
    }
    if plot.contained {
        group = group.contained();
    } else {
        group = group.as_child(
            Restart::Permanent,
            Intensity { max_restarts: 2, ..Intensity::default() },
            pauses(),
        );
    }
    let mut children = Vec::new();
    for (at, habit) in plot.habits.iter().enumerate() {
        let child = format!("{name}-{at}");
        group = group.child(census.spec(&child, habit.clone()));
        children.push(child);
        if at == 0
            && let Some(inner) = &plot.inner
        {
            group = group.group(build(inner, "inner", census, order));
            children.push("inner".to_owned());
        }
    }
    if plot.ordered {
        order.groups.push(children.clone());
        if plot.strategy != Strategy::OneForOne {
            order.waves.push(children);
        }
    }
    group
}

fn pauses() -> Backoff {
    Backoff { first: millis(10), max: millis(50), ..Backoff::default() }
}

/// Makes trouble. Questions are asked without waiting for the answer; all of them must be answered in the end.
fn make(trouble: &Trouble, at: usize, registry: &Registry, census: &Census, open: &Arc<AtomicU32>) {
    let children: Vec<String> =
        registry.children().iter().skip(1).map(|child| child.name.to_string()).collect();
    let pick = |number: usize| children.get(number % children.len().max(1)).cloned().unwrap_or_default();
    let ask = |asking: std::pin::Pin<Box<dyn Future<Output = ()>>>| {
        open.fetch_add(1, Ordering::AcqRel);
        let open = Arc::clone(open);
        actix::spawn(async move {
            asking.await;
            open.fetch_sub(1, Ordering::AcqRel);
        });
    };
    let registry = registry.clone();
    match trouble.clone() {
        // Some are not there any more.
        Trouble::Crash(number) => drop(registry.crash(&pick(number))),
        Trouble::Quit(number) => {
            if let Ok(living) = registry.named::<Living>(&pick(number)) {
                living.do_send(Quit);
            }
        }
        Trouble::Restart(number) => {
            let name = pick(number);
            ask(Box::pin(async move { drop(registry.restart(&name).await) }));
        }
        Trouble::Remove(number) => {
            let name = pick(number);
            ask(Box::pin(async move { drop(registry.remove(&name).await) }));
        }
        Trouble::Add(number, habit) => {
            let spec = census.spec(&format!("added-{at}"), habit);
            let group = ["root", "inner"][number % 2];
            ask(Box::pin(async move { drop(registry.add(group, spec).await) }));
        }
        Trouble::Sleep(_) => {}
    }
}

/// Which children of which group stand in order.
#[derive(Default)]
struct Order {
    /// They stop in this order at the end.
    groups: Vec<Vec<String>>,
    /// None of them starts before those in front of it are ready.
    waves: Vec<Vec<String>>,
}

/// Where a child stands by the events alone.
#[derive(Default)]
struct Stand {
    life: u64,
    alive: bool,
    ready: bool,
    closed: bool,
}

impl Stand {
    fn ready() -> Self {
        Self { life: 1, alive: true, ready: true, closed: false }
    }
}

#[derive(Default)]
struct Seen(BTreeMap<String, Stand>);

impl Seen {
    /// Follows the events of a tree and checks them one by one.
    fn follow(&mut self, events: &[SupervisorEvent], order: &Order, at_the_end: bool) -> Result<(), String> {
        for event in events {
            let stand = self.0.entry(event.child.to_string()).or_default();
            match event.kind {
                EventKind::Started => {
                    if stand.alive || event.generation <= stand.life {
                        return Err(format!("{event}: life {} is alive: {}", stand.life, stand.alive));
                    }
                    (stand.life, stand.alive) = (event.generation, true);
                    self.all_in_front_are_ready(event, &order.waves)?;
                }
                EventKind::Exited { .. } | EventKind::Stopped => {
                    (stand.alive, stand.ready) = (false, false);
                    if at_the_end && event.kind == EventKind::Stopped {
                        self.nobody_behind_lives(event, &order.groups)?;
                    }
                }
                EventKind::Ready if !stand.alive => return Err(format!("{event}, and is not alive")),
                EventKind::Ready => stand.ready = true,
                EventKind::Closed { .. } => stand.closed = true,
                _ => {}
            }
        }
        Ok(())
    }

    fn all_in_front_are_ready(&self, event: &SupervisorEvent, waves: &[Vec<String>]) -> Result<(), String> {
        let group = waves.iter().find(|children| children.contains(&event.child.to_string()));
        let in_front = group.into_iter().flatten().take_while(|name| **name != *event.child);
        // A group that stays down tells nothing of that.
        let waited_for = in_front
            .filter(|name| *name != "inner")
            .find(|name| self.0.get(*name).is_some_and(|stand| !stand.ready && !stand.closed));
        waited_for.map_or(Ok(()), |name| Err(format!("{event} before {name} was ready")))
    }

    fn nobody_behind_lives(&self, event: &SupervisorEvent, groups: &[Vec<String>]) -> Result<(), String> {
        let group = groups.iter().find(|children| children.contains(&event.child.to_string()));
        let mut behind = group.into_iter().flatten().skip_while(|name| **name != *event.child).skip(1);
        let living = behind.find(|name| self.0.get(*name).is_some_and(|stand| stand.alive));
        living.map_or(Ok(()), |name| Err(format!("{event} before {name}")))
    }
}

/// Lives through the trouble and checks the promises. `Err` says which was broken.
async fn live_through(plot: &Plot, troubles: &[Trouble]) -> Result<(), String> {
    let (census, open, mut order) = (Census::default(), Arc::<AtomicU32>::default(), Order::default());
    let intensity = Intensity { max_restarts: 4, within: Duration::from_secs(10) };
    let root = build(plot, "root", &census, &mut order).intensity(intensity).backoff(pauses());
    let registry = registry_common::start(root).await;
    let (events, mut seen) = (RefCell::new(registry.events()), Seen::default());
    seen.0 = registry.children().iter().map(|child| (child.name.to_string(), Stand::ready())).collect();
    let news =
        || -> Vec<SupervisorEvent> { std::iter::from_fn(|| events.borrow_mut().try_recv().ok()).collect() };
    for (at, trouble) in troubles.iter().enumerate() {
        make(trouble, at, &registry, &census, &open);
        if let Trouble::Sleep(time) = trouble {
            sleep(millis(*time)).await;
        }
        seen.follow(&news(), &order, false)?;
    }
    sleep(Duration::from_mins(2)).await;
    seen.follow(&news(), &order, false)?;
    at_rest(&registry, &seen, &census)?;
    registry.shutdown().await;
    sleep(millis(1)).await;
    seen.follow(&news(), &order, true)?;
    match (census.alive(), census.1.load(Ordering::Acquire), open.load(Ordering::Acquire)) {
        (0, 0, 0) => Ok(()),
        (alive, overlaps, open) => {
            Err(format!("{alive} are alive, {overlaps} lives overlapped, {open} questions are open"))
        }
    }
}

/// After the trouble everybody is where it belongs, and everything that can be asked tells the same.
fn at_rest(registry: &Registry, seen: &Seen, census: &Census) -> Result<(), String> {
    let children = registry.children();
    let ended = !matches!(children[0].state, ChildState::Ready);
    let mut ready = 0;
    for child in &children {
        let alive = seen.0.get(&*child.name).is_some_and(|stand| stand.alive);
        let consistent = match child.state {
            ChildState::Ready | ChildState::Finished | ChildState::Failed => true,
            ChildState::Stopped => ended || children.iter().any(|other| other.state == ChildState::Failed),
            ChildState::Starting | ChildState::Waiting | ChildState::Stopping => false,
        };
        if !consistent || (child.group.is_some() && alive != (child.state == ChildState::Ready)) {
            return Err(format!("{child:?} after the trouble, alive: {alive}"));
        }
        ready += u32::from(child.state == ChildState::Ready && !child.is_group);
    }
    let well = children.iter().all(|child| matches!(child.state, ChildState::Ready | ChildState::Finished));
    if registry.health().is_ready() != well || census.alive() != ready {
        return Err(format!("{} and {} live, with {children:?}", registry.health(), census.alive()));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_no_lives_overlap_nobody_hangs_and_everybody_ends_where_it_belongs(
        plot in trees(),
        troubles in troubles(),
    ) {
        let lived = in_virtual_time(live_through(&plot, &troubles));
        prop_assert!(lived.is_ok(), "{lived:?}");
    }
}
