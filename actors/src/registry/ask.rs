//! The registry as an actor: the same questions as messages, for those who speak nothing else.

use actix::prelude::*;

use super::{ChildInfo, Health, Registry, Spec, StartFailed, SupervisorEvent, Totals};

/// Answers questions about the tree it lives in. Add it like any other child: `Group::child(RegistryActor::spec())`.
#[derive(Debug)]
pub struct RegistryActor {
    registry: Registry,
}

impl RegistryActor {
    /// The spec of a child called `registry` that provides all messages of this module but [`StartChild`], which is reached by address.
    pub fn spec() -> Spec<Self> {
        Spec::new("registry", |cx| Self { registry: cx.registry() })
            .provides::<WhichChildren>()
            .provides::<AskHealth>()
            .provides::<AskTotals>()
            .provides::<Subscribe>()
            .provides::<StopChild>()
            .provides::<RestartChild>()
    }
}

impl Actor for RegistryActor {
    type Context = Context<Self>;
}

/// Who is there? See [`Registry::children`].
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "Vec<ChildInfo>")]
pub struct WhichChildren;

/// Is all well? See [`Registry::health`].
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "Health")]
pub struct AskHealth;

/// What was counted? See [`Registry::totals`].
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "Totals")]
pub struct AskTotals;

/// Tell me what happens. See [`Registry::subscribe`].
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct Subscribe(pub Recipient<SupervisorEvent>);

/// Add a child to this group. See [`Registry::add`].
#[derive(Debug, Message)]
#[rtype(result = "Result<(), StartFailed>")]
pub struct StartChild<A: Actor<Context = Context<A>>> {
    /// Which group.
    pub group: String,
    /// The child.
    pub spec: Spec<A>,
}

/// Remove this child. See [`Registry::remove`].
#[derive(Clone, Debug, Message)]
#[rtype(result = "Result<u64, StartFailed>")]
pub struct StopChild(pub String);

/// Restart this child. See [`Registry::restart`].
#[derive(Clone, Debug, Message)]
#[rtype(result = "Result<(), StartFailed>")]
pub struct RestartChild(pub String);

impl Handler<WhichChildren> for RegistryActor {
    type Result = Vec<ChildInfo>;

    fn handle(&mut self, _: WhichChildren, _: &mut Self::Context) -> Self::Result {
        self.registry.children()
    }
}

impl Handler<AskHealth> for RegistryActor {
    type Result = MessageResult<AskHealth>;

    fn handle(&mut self, _: AskHealth, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.registry.health())
    }
}

impl Handler<AskTotals> for RegistryActor {
    type Result = MessageResult<AskTotals>;

    fn handle(&mut self, _: AskTotals, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.registry.totals())
    }
}

impl Handler<Subscribe> for RegistryActor {
    type Result = ();

    fn handle(&mut self, Subscribe(listener): Subscribe, _: &mut Self::Context) {
        self.registry.subscribe(listener);
    }
}

impl<A: Actor<Context = Context<A>>> Handler<StartChild<A>> for RegistryActor {
    type Result = ResponseFuture<Result<(), StartFailed>>;

    fn handle(&mut self, StartChild { group, spec }: StartChild<A>, _: &mut Self::Context) -> Self::Result {
        let registry = self.registry.clone();
        Box::pin(async move { registry.add(&group, spec).await })
    }
}

impl Handler<StopChild> for RegistryActor {
    type Result = ResponseFuture<Result<u64, StartFailed>>;

    fn handle(&mut self, StopChild(name): StopChild, _: &mut Self::Context) -> Self::Result {
        let registry = self.registry.clone();
        Box::pin(async move { registry.remove(&name).await })
    }
}

impl Handler<RestartChild> for RegistryActor {
    type Result = ResponseFuture<Result<(), StartFailed>>;

    fn handle(&mut self, RestartChild(name): RestartChild, _: &mut Self::Context) -> Self::Result {
        let registry = self.registry.clone();
        Box::pin(async move { registry.restart(&name).await })
    }
}
